"""Which rows before its shards a rank needs, and from whom: decided on the host from the layout (docs/linear.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raypack.exchange.layout import Layout, Segments
from raypack.exchange.streams import Stream, streams_around
from raypack.kernels.packing import Kept
from raypack.plan.topology import Block


@dataclass(frozen=True)
class HaloPlan:
    """One round's halos on one rank. Built by `plan_halo` from the layout alone.

    Attributes:
        block: ranks of the connected component of children.
        rows: this rank's rows that others need, ordered by (rank, child width descending, position); those for rank
            `block.first + i` are the `send[i]` next ones.
        send, receive: rows to and from every rank of the block.
        order: received row of each halo row, in the order of `inserts`.
        inserts: (row, halo rows that stand before it), in row order.
        since: for the rank's rows with the halo rows inserted: rows of the same piece before each, int64.
    """

    block: Block
    rows: np.ndarray
    send: tuple[int, ...]
    receive: tuple[int, ...]
    order: np.ndarray
    inserts: tuple[tuple[int, int], ...]
    since: np.ndarray
    kept: Kept = field(default_factory=Kept, repr=False, compare=False)


def plan_halo(layout: Layout, rank: int, segments: Segments, taps: int) -> HaloPlan:
    """The halos of `rank` for a convolution over `taps` tokens, the token itself included."""
    block = layout.component(rank, full=False)
    outgoing: list[list[np.ndarray]] = [[] for _ in range(block.width)]
    incoming: list[tuple[int, int, int]] = []
    inserts: list[tuple[int, int]] = []
    at = 0
    for number, stream in enumerate(streams_around(layout, rank)):
        i, shift = rank - stream.child.first, stream.child.first - block.first
        low, high = int(stream.edges[i]), int(stream.edges[i + 1])
        for other in range(i + 1, stream.child.width):
            first, last = _needed(stream, other, taps)
            first, last = max(first, low), min(last, high)
            if first < last:
                outgoing[shift + other].append(np.arange(first, last) - low + at)
        first, last = _needed(stream, i, taps)
        if first < last:
            inserts.append((at, last - first))
            held = stream.held(first, last, range(i))
            incoming.extend((shift + source, number, count) for source, count in enumerate(held) if count)
        at += high - low
    receive = [0] * block.width
    for source, _, count in incoming:
        receive[source] += count
    none = np.zeros(0, dtype=np.int64)
    return HaloPlan(
        block=block,
        rows=np.concatenate([none, *(rows for each in outgoing for rows in each)]),
        send=tuple(sum(len(rows) for rows in each) for each in outgoing),
        receive=tuple(receive),
        order=_order(incoming),
        inserts=tuple(inserts),
        since=_since(segments, inserts),
    )


def _needed(stream: Stream, index: int, taps: int) -> tuple[int, int]:
    """Stream rows [first, last) that the block's rank `index` needs from ranks before it."""
    low, high = int(stream.edges[index]), int(stream.edges[index + 1])
    if low == high:
        return 0, 0
    return max(int(stream.starts[stream.document(low)]), low - taps + 1), low


def _order(incoming: list[tuple[int, int, int]]) -> np.ndarray:
    """`incoming` = (source, stream, rows) by (stream, source); rows arrive by (source, stream)."""
    arrival, at = {}, 0
    for source, stream, count in sorted(incoming):
        arrival[source, stream] = np.arange(at, at + count)
        at += count
    return np.concatenate([np.zeros(0, dtype=np.int64), *(arrival[s, n] for s, n, _ in incoming)])


def _since(segments: Segments, inserts: list[tuple[int, int]]) -> np.ndarray:
    """Rows of the same piece before each row, halo rows included and counted."""
    sizes = segments.lengths.copy()
    starts = np.cumsum(sizes) - sizes
    for row, count in inserts:
        sizes[np.searchsorted(starts, row)] += count
    return np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
