"""List scheduling on laminar blocks, and packing of placed samples into rounds.

Longest processing time first, widest blocks first: at each width the blocks stand in a heap by load, and when the
width falls their parts inherit it. A block's load is that of its busiest rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from raypack.plan.topology import Block
from raypack.planning.problem import Problem

SWAPS, PARTNERS = 300, 16
"""Exchanges of one-rank items that even out a schedule at most, and idle ranks that are asked each time."""


def cheapest_within(seconds: np.ndarray, area: np.ndarray, limit: float) -> np.ndarray:
    """Index of the least-area column with seconds <= limit in each row; the quickest one where none is. [rows]."""
    masked = np.where(seconds <= limit, area, np.inf)
    best = masked.argmin(axis=1)
    none = ~np.isfinite(masked[np.arange(len(best)), best])
    best[none] = seconds[none].argmin(axis=1)
    return best


def list_schedule(
    widths: np.ndarray,
    seconds: np.ndarray,
    blocks: Mapping[int, Sequence[Block]],
    load: np.ndarray,
    entry: dict[int, float],
) -> np.ndarray:
    """Give every item a block of its width.

    Args:
        widths, seconds: of each item, in an order that breaks ties.
        blocks: legal blocks of every width that occurs.
        load: seconds of each rank so far; updated in place.
        entry: seconds that a block's first item of a width adds besides its own (latencies of one more pack).

    Returns:
        int64 [items]: first rank of each item's block.
    """
    order = np.lexsort((np.arange(len(widths)), -seconds, -widths))
    chosen = np.empty(len(widths), dtype=np.int64)
    start = 0
    while start < len(order):
        width = int(widths[order[start]])
        end = start + int(np.searchsorted(-widths[order[start:]], -width, side="right"))
        tiles = blocks[width]
        first = np.array([b.first for b in tiles], dtype=np.int64)
        loads = load[first[:, None] + np.arange(width)].max(axis=1)
        heap = [(value + entry.get(width, 0.0), at) for value, at in zip(loads.tolist(), first.tolist(), strict=True)]
        heapq.heapify(heap)
        items = order[start:end]
        added: dict[int, float] = {}
        for item, cost in zip(items.tolist(), seconds[items].tolist(), strict=True):
            value, at = heap[0]
            chosen[item] = at
            added[at] = added.get(at, entry.get(width, 0.0)) + cost
            heapq.heapreplace(heap, (value + cost, at))
        for at, value in added.items():
            load[at : at + width] += value
        if width == 1:
            mine = chosen[items]
            even_out(mine, seconds[items], load, first)
            chosen[items] = mine
        start = end
    return chosen


def first_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """Bin of each size, first fit in the given order; every size must fit alone."""
    if sum(sizes) <= capacity:
        return [0] * len(sizes)
    bins: list[int] = []
    where = []
    for size in sizes:
        for number, used in enumerate(bins):
            if used + size <= capacity:
                bins[number] += size
                where.append(number)
                break
        else:
            bins.append(size)
            where.append(len(bins) - 1)
    return where


def even_out(rank: np.ndarray, seconds: np.ndarray, load: np.ndarray, allowed: np.ndarray) -> None:
    """Move and swap one-rank items between the busiest rank and the idlest ones while that lowers the busiest.

    Args:
        rank, seconds: of each item; `rank` is updated in place.
        load: seconds of each rank, items included; updated in place.
        allowed: ranks that items may be on.
    """
    held: dict[int, list[int]] = {int(at): [] for at in allowed}
    for item, at in enumerate(rank.tolist()):
        held[at].append(item)
    for _ in range(SWAPS):
        order = allowed[np.argsort(load[allowed], kind="stable")]
        busiest, idle = int(order[-1]), order[: min(PARTNERS, len(order) - 1)]
        mine = np.array(held[busiest], dtype=np.int64)
        theirs = np.array([item for at in idle.tolist() for item in held[at]], dtype=np.int64)
        if not len(mine) or not len(idle):
            return
        # One more column stands for giving an item away without taking one back.
        partner = np.concatenate([rank[theirs], idle])
        back = np.concatenate([seconds[theirs], np.zeros(len(idle))])
        shift = seconds[mine, None] - back[None, :]
        after = np.maximum(load[busiest] - shift, load[partner][None, :] + shift)
        at, to = np.unravel_index(int(after.argmin()), after.shape)
        if after[at, to] >= load[busiest] * (1 - 1e-6):
            return
        other = int(partner[to])
        _move(int(mine[at]), other, rank, held)
        if to < len(theirs):
            _move(int(theirs[to]), busiest, rank, held)
        load[busiest] -= shift[at, to]
        load[other] += shift[at, to]


def _move(item: int, to: int, rank: np.ndarray, held: dict[int, list[int]]) -> None:
    held[int(rank[item])].remove(item)
    held[to].append(item)
    rank[item] = to


def capacity(problem: Problem, width: int) -> int:
    """Tokens that a block of `width` can hold in one round where parent = child = the block."""
    equal = problem.equal_shapes
    at = int(np.flatnonzero(equal.parent == width)[0])
    full, sparse, tokens = float(equal.full_held[at]), float(equal.sparse_held[at]), problem.cap * width
    if sparse:
        tokens = min(tokens, int(problem.cap / sparse * (1 + 1e-12)))
    if full:
        step = width if equal.padded else 1  # padded: one token more may be one on every rank
        tokens = min(tokens, int(problem.cap / (full * step) * (1 + 1e-12)) * step)
    return tokens


def stack_rounds(
    problem: Problem, lengths: np.ndarray, first: np.ndarray, widths: np.ndarray, depth: np.ndarray
) -> np.ndarray:
    """One width per pack and round, widest first: no rank waits inside a pack, at the price of more rounds.

    Args:
        lengths, first, widths: of each sample and its block.
        depth: int64 [world], rounds that each rank has used before; updated in place.

    Returns:
        Round of each sample.
    """
    rounds = np.empty(len(first), dtype=np.int64)
    order = np.lexsort((np.arange(len(first)), first, -widths))
    capacities = {int(w): capacity(problem, int(w)) for w in np.unique(widths)}
    edges = np.flatnonzero(np.diff(first[order], prepend=-1) | np.diff(widths[order], prepend=-1))
    for start, end in pairwise([*edges.tolist(), len(order)]):
        items = order[start:end]
        width, at = int(widths[items[0]]), int(first[items[0]])
        base = int(depth[at : at + width].max())
        bins = first_fit(lengths[items].tolist(), capacities[width])
        rounds[items] = base + np.array(bins)
        depth[at : at + width] = base + max(bins) + 1
    return rounds


def mix_rounds(problem: Problem, lengths: np.ndarray, first: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Widths side by side and nested in each round, first fit by the memory of every rank. Round of each sample."""
    equal = problem.equal_shapes
    column = np.searchsorted(equal.parent, widths)
    held = np.maximum(equal.full_held, equal.sparse_held)[column]
    # One token more for the shards that get an extra one in nested blocks.
    need = lengths * np.maximum(1 / widths, held) + (widths > 1)
    room: list[np.ndarray] = []
    rounds = np.empty(len(first), dtype=np.int64)
    order = np.lexsort((np.arange(len(first)), -widths))
    spans = zip(order.tolist(), first[order].tolist(), widths[order].tolist(), need[order].tolist(), strict=True)
    for item, at, width, amount in spans:
        number = next((k for k, free in enumerate(room) if free[at : at + width].min() >= amount), len(room))
        if number == len(room):
            room.append(np.full(problem.topology.world, float(problem.cap)))
        room[number][at : at + width] -= amount
        rounds[item] = number
    return rounds
