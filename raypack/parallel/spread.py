"""The hsap part of a layout around one rank: which node and which head share it is, and whose tokens are where.

A run is *spread* where its attention is hsap and its parent spans nodes: heads are then split over the ranks of each
node and the segments of its documents over the nodes. (Inside one node hsap is nothing but the exchange of heads.)
Spread parents are nested or disjoint, and nodes inside the widest are of one size: a rank has one share of the heads,
and one schedule for all spread parents inside the widest around it, since ticks must have one number everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from raypack.parallel.kv_schedule import STEP_ROWS, Pack, Schedule, Signature, schedule_of
from raypack.parallel.layout import Layout, Run
from raypack.parallel.topology import Block


def is_spread(layout: Layout, run: Run) -> bool:
    return run.attention == "hsap" and not layout.topology.in_one_node(run.parent)


@dataclass(frozen=True)
class Spread:
    """
    Attributes:
        block: the widest spread parent around the rank.
        width: ranks of one of its nodes.
        share: index of the rank in its node, which is its share of the heads.
        placements: int64, the layout's placements of all spread parents inside the block, in canonical order: the
            schedule's documents.
    """

    block: Block
    width: int
    share: int
    placements: np.ndarray
    schedule: Schedule

    def node_of(self, rank: int) -> int:
        """Node of a rank of the block, counted from the block's first."""
        return (rank - self.block.first) // self.width

    def rank_at(self, node: int) -> int:
        """The rank of a node with the same share of the heads."""
        return self.block.first + node * self.width + self.share

    def node_block(self, node: int) -> Block:
        return Block(self.block.first + node * self.width, self.width)

    def parts(self, layout: Layout, run: Run, low: int, high: int) -> list[tuple[int, int, int]]:
        """(node, low, high) of the tokens [low, high) of a run's stream, in order, neighbours joined."""
        segments = self.schedule.segments
        first, end = self._documents(run)
        a, b = np.searchsorted(segments.document, (first, end))
        document = segments.document[a:b]
        start = (layout.offsets[self.placements] - layout.offsets[run.first])[document]
        lows = np.maximum(start + segments.low[a:b], low)
        highs = np.minimum(start + segments.high[a:b], high)
        keep = highs > lows
        node, lows, highs = segments.node[a:b][keep], lows[keep], highs[keep]
        if not len(node):
            return []
        new = np.flatnonzero(np.append(True, node[1:] != node[:-1]))
        last = np.append(new[1:], len(node)) - 1
        return list(zip(node[new].tolist(), lows[new].tolist(), highs[last].tolist(), strict=True))

    def lengths(self, run: Run) -> tuple[int, ...]:
        """Local tokens of each of the run's documents."""
        first, end = self._documents(run)
        return self.schedule.lengths[first:end]

    def bounds(self, layout: Layout, run: Run) -> tuple[int, ...]:
        """Local rows of the run before the shard of each rank of its child, and all of them."""
        local = [0]
        for low, high in pairwise(run.cuts):
            parts = self.parts(layout, run, low, high)
            local.append(local[-1] + sum(b - a for node, a, b in parts if node == self.schedule.node))
        return tuple(local)

    def _documents(self, run: Run) -> tuple[int, int]:
        first, end = np.searchsorted(self.placements, (run.first, run.end))
        return int(first), int(end)


def build_spread(layout: Layout, rank: int, step_rows: int = STEP_ROWS) -> Spread | None:
    """The hsap part of a layout around `rank`; None where there is none."""
    spread = [run for run in layout.runs if is_spread(layout, run)]
    around = [run.parent for run in spread if run.parent.holds(rank)]
    if not around:
        return None
    block = max(around, key=lambda b: b.width)
    runs = [run for run in spread if block.contains(run.parent)]
    width = layout.topology.node_sizes(block)[0]
    packs = []
    for parent in sorted({run.parent for run in runs}, key=lambda b: (-b.width, b.first)):
        mine = [run for run in runs if run.parent == parent]
        homes = np.concatenate([_homes(layout, run, width) for run in mine])
        lengths = np.concatenate([layout.columns["length"][run.first : run.end] for run in mine])
        first = (parent.first - block.first) // width
        packs.append(Pack(first, parent.width // width, lengths.tobytes(), homes.tobytes()))
    node, share = divmod(rank - block.first, width)
    placements = np.concatenate([np.arange(run.first, run.end) for run in runs])
    return Spread(block, width, share, placements, schedule_of(Signature(tuple(packs), node, step_rows)))


def _homes(layout: Layout, run: Run, width: int) -> np.ndarray:
    """int64: node of the first token of each of the run's documents, counted from the parent's first node."""
    starts = layout.offsets[run.first : run.end] - layout.offsets[run.first]
    rank = run.child.first + np.searchsorted(run.cuts, starts, side="right") - 1
    return (rank - run.parent.first) // width
