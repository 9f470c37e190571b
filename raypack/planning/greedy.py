"""List scheduling on laminar blocks, and packing of one block's samples into rounds.

Longest processing time first, widest blocks first: at each width the blocks stand in a heap by load, and when the
width falls their parts inherit it. A block's load is that of its busiest rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from raypack.plan.topology import Block

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
