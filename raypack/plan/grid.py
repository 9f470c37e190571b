"""Integer helpers on a topology, as arrays: nodes of ranks, covers of the world, unions of blocks."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from operator import attrgetter

import numpy as np

from raypack.plan.topology import Block, Topology


@dataclass(frozen=True)
class Grid:
    """Arrays [world]: node of each rank, first rank of that node, one past its last."""

    node: np.ndarray
    node_first: np.ndarray
    node_end: np.ndarray
    node_starts: np.ndarray


@lru_cache(maxsize=16)
def grid(topology: Topology) -> Grid:
    node = np.array(topology.node_of, dtype=np.int64)
    starts = np.array(topology.node_firsts, dtype=np.int64)
    ends = starts + np.array(topology.nodes, dtype=np.int64)
    return Grid(node, starts[node], ends[node], starts)


@lru_cache(maxsize=256)
def cover(topology: Topology, width: int) -> tuple[Block, ...]:
    """The widest blocks of at most `width` ranks: disjoint, together the whole world, in rank order.

    They are what "a block of this width" means where the width is not legal everywhere.
    """
    chosen, at = [], 0
    by_first: dict[int, list[Block]] = {}
    for block in topology.blocks:
        if block.width <= width:
            by_first.setdefault(block.first, []).append(block)
    while at < topology.world:
        block = max(by_first[at], key=lambda b: b.width)
        chosen.append(block)
        at = block.end
    return tuple(chosen)


def unions(first: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The widest blocks among laminar blocks given as arrays: (first, end), in rank order, disjoint."""
    order = np.lexsort((-width, first))
    starts, ends = first[order], (first + width)[order]
    reach = np.concatenate(([-1], np.maximum.accumulate(ends)[:-1])) if len(ends) else ends
    top = starts >= reach
    return starts[top], ends[top]


def spread(first: np.ndarray, end: np.ndarray, world: int) -> np.ndarray:
    """How many of the intervals [first, end) hold each rank: int64 [world]."""
    steps = np.bincount(first, minlength=world + 1) - np.bincount(end, minlength=world + 1)
    return np.cumsum(steps[:world])


def interval_max(values: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Largest of values[first:end] for disjoint, ascending, non-empty intervals."""
    if not len(first):
        return np.zeros(0)
    edges = np.stack([first, end], axis=1).ravel()
    return np.maximum.reduceat(np.append(values, values[-1]), edges)[::2]


@lru_cache(maxsize=4096)
def inner_blocks(topology: Topology, parent: Block) -> dict[int, list[Block]]:
    """Node-local blocks inside `parent` by width."""
    found: dict[int, list[Block]] = {}
    for width in topology.widths:
        blocks = topology.blocks_of_width(width)
        start = bisect_left(blocks, parent.first, key=attrgetter("first"))
        inside = list(takewhile(lambda b: b.end <= parent.end, blocks[start:]))
        inside = [b for b in inside if topology.in_one_node(b)]
        if inside:
            found[width] = inside
    return found
