"""`kv_gather` (LASP-2H): full attention of documents whose queries stay in their shards while K and V are gathered.

All ranks of a block gather the K and V of its kv_gather documents, padded to the longest shard; then each attends for
its own rows, which needs the rows before them of the document that enters its shard. The backward sends the gradients
of these rows back to their owners, in buffers of the same size, where they are summed in rank order, at least in fp32.
One gather a block and direction, on the block's own group, wide blocks first: the same order on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.comm.collect import start_gather, swap
from raypack.comm.wire import Wire
from raypack.exchange.layout import Layout, Run
from raypack.exchange.streams import Stream, streams_around
from raypack.plan.topology import Block

OP = "kv_gather"


@dataclass(frozen=True)
class BlockGather:
    """The kv_gather documents of one block on this rank.

    Attributes:
        longest: rows of the block's longest shard: what every rank sends.
        rows: this rank's rows.
        remote: (rank in the block, first row, end) of the rows before this rank's that its first document needs.
        queries, keys: of each document on this rank, its rows here, and those up to the last one here.
    """

    block: Block
    longest: int
    rows: int
    remote: tuple[tuple[int, int, int], ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class GatherPlan:
    """One round's kv_gather documents around one rank.

    Attributes:
        sections: (rows, block index in `blocks` or -1 for rows that are exchanged by heads), in row order.
        blocks: widest first.
    """

    sections: tuple[tuple[int, int], ...]
    blocks: tuple[BlockGather, ...]

    def split(self, x: Tensor) -> list[Tensor]:
        """Rows of `x` by what happens to them: [exchanged, those of each block ...]."""
        parts = x.split([rows for rows, _ in self.sections])
        chosen: list[list[Tensor]] = [[x[:0]] for _ in range(1 + len(self.blocks))]
        for part, (_, where) in zip(parts, self.sections, strict=True):
            chosen[where + 1].append(part)
        return [torch.cat(each) for each in chosen]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Inverse of `split`."""
        sizes: list[list[int]] = [[] for _ in parts]
        for rows, where in self.sections:
            sizes[where + 1].append(rows)
        pieces = [iter(part.split(size)) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat([*(next(pieces[where + 1]) for _, where in self.sections), *(part[:0] for part in parts)])


def gathers(run: Run) -> bool:
    """Whether a run's K and V are gathered; on one rank there is nothing to gather."""
    return run.attention == "kv_gather" and run.child.width > 1


def plan_gather(layout: Layout, rank: int) -> GatherPlan | None:
    """The gathers that `rank` takes part in; None where there is none."""
    streams = streams_around(layout, rank, gathers)
    if not streams:
        return None
    index = {stream.child: i for i, stream in enumerate(streams)}
    parts = []
    for run in layout.runs:
        if run.child.holds(rank):
            i = rank - run.child.first
            rows = run.cuts[i + 1] - run.cuts[i]
            parts.append((run.rows[i], rows, index[run.child] if gathers(run) else -1))
    sections: list[tuple[int, int]] = []
    for _, rows, where in sorted(part for part in parts if part[1]):
        before = sections.pop()[0] if sections and sections[-1][1] == where else 0
        sections.append((before + rows, where))
    return GatherPlan(tuple(sections), tuple(_block_gather(stream, rank) for stream in streams))


def _block_gather(stream: Stream, rank: int) -> BlockGather:
    i = rank - stream.child.first
    low, high = int(stream.edges[i]), int(stream.edges[i + 1])
    counts = stream.edges[1:] - stream.edges[:-1]
    first, last = stream.document(low), stream.document(max(high - 1, low))
    edges = stream.starts[first : last + 2].clip(low, high)
    queries = (edges[1:] - edges[:-1]).tolist() if high > low else []
    remote = []
    start = int(stream.starts[first])
    if high > low and start < low:
        for source in range(stream.holder(start), i):
            at = int(stream.edges[source])
            begin, end = max(start, at) - at, int(stream.edges[source + 1]) - at
            if begin < end:
                remote.append((source, begin, end))
    before = sum(end - begin for _, begin, end in remote)
    keys = [n + before if d == 0 else n for d, n in enumerate(queries)]
    return BlockGather(stream.child, int(counts.max()), high - low, tuple(remote), tuple(queries), tuple(keys))


def gather_keys(kv: Tensor, plan: BlockGather, wire: Wire) -> Tensor:
    """This rank's K and V with those before them that its first document needs: [rows, ...] -> [keys, ...]."""
    return _GatherKeys.apply(kv, plan, wire)


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv: Tensor, plan: BlockGather, wire: Wire) -> Tensor:
        ctx.plan, ctx.wire = plan, wire
        sent = kv.new_zeros((plan.longest, *kv.shape[1:]))
        sent[: plan.rows] = kv
        parts = start_gather(sent, plan.block, wire, OP).wait()
        return torch.cat([*(parts[rank, first:end] for rank, first, end in plan.remote), kv])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        plan: BlockGather = ctx.plan
        width, longest = plan.block.width, plan.longest
        sent = grad.new_zeros((width, longest, *grad.shape[1:]))
        at = 0
        for rank, first, end in plan.remote:
            sent[rank, first:end] = grad[at : at + end - first]
            at += end - first
        sizes = [longest] * width
        received = swap(sent.flatten(0, 1), sizes, sizes, plan.block, ctx.wire, OP).view(
            width, longest, *grad.shape[1:]
        )
        total = grad[at:].to(torch.promote_types(grad.dtype, torch.float32))
        for part in received:
            total = total + part[: plan.rows]
        return total.to(grad.dtype), None, None
