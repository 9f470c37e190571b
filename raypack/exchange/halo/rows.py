"""Rows before a shard that a short causal convolution needs: up to `taps - 1` of the same document (docs/linear.md).

Where shards are shorter than that they lie several ranks back. Each travels from the rank that holds it straight to the
one that needs it, in one all-to-all on the group of the component of children; the backward is its adjoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.comm.collect import swap
from raypack.comm.wire import Wire
from raypack.exchange.layout import Layout, Segments
from raypack.exchange.streams import Stream, streams_around
from raypack.plan.topology import Block

OP = "conv_halo"


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
    _kept: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device, name: str) -> Tensor:
        """`rows`, `order` or `since` as a tensor, made once a round and device."""
        if (name, device) not in self._kept:
            self._kept[name, device] = torch.from_numpy(getattr(self, name)).to(device, non_blocking=True)
        return self._kept[name, device]


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


def halo_rows(x: Tensor, plan: HaloPlan, wire: Wire) -> Tensor:
    """The rows that stand before this rank's shards, in the order of `plan.inserts`: [rows, C] -> [halo rows, C].

    Every rank of a component of two or more takes part. Differentiable: gradients go back to the ranks that sent, where
    those of rows that several ranks needed are summed in rank order, at least in fp32.
    """
    if plan.block.width == 1:
        return x[:0]
    return _HaloRows.apply(x, plan, wire)


class _HaloRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HaloPlan, wire: Wire) -> Tensor:
        ctx.plan, ctx.wire, ctx.rows = plan, wire, len(x)
        received = swap(x[plan.on(x.device, "rows")], plan.send, plan.receive, plan.block, wire, OP)
        return received[plan.on(x.device, "order")]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        plan: HaloPlan = ctx.plan
        sent = torch.empty_like(grad)
        sent[plan.on(grad.device, "order")] = grad
        returned = swap(sent, plan.receive, plan.send, plan.block, ctx.wire, OP)
        total = returned.new_zeros((ctx.rows, grad.shape[1]), dtype=torch.promote_types(grad.dtype, torch.float32))
        rows = plan.on(grad.device, "rows").split(list(plan.send))
        for where, part in zip(rows, returned.split(list(plan.send)), strict=True):
            if len(where):
                total[where] += part  # a rank asks for a row once, so no index comes twice
        return total.to(grad.dtype), None, None
