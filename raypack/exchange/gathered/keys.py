"""`kv_gather` (LASP-2H): full attention of documents whose queries stay in their shards while K and V are gathered.

All ranks of a block gather the K and V of its kv_gather documents, padded to the longest shard; then each attends for
its own rows, which needs the rows before them of the document that enters its shard. The backward sends the gradients
of these rows back to their owners, in buffers of the same size, where they are summed in rank order, at least in fp32.
One gather a block and direction, on the block's own group, wide blocks first: the same order on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.comm.collect import start_gather, swap
from raypack.comm.wire import Wire
from raypack.exchange.gathered.plan import BlockGather, GatherPlan

OP = "kv_gather"


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


def split_rows(plan: GatherPlan, x: Tensor) -> list[Tensor]:
    """Rows of `x` by what happens to them: [exchanged, those of each block ...]."""
    parts = x.split([rows for rows, _ in plan.sections])
    chosen: list[list[Tensor]] = [[x[:0]] for _ in range(1 + len(plan.blocks))]
    for part, (_, where) in zip(parts, plan.sections, strict=True):
        chosen[where + 1].append(part)
    return [torch.cat(each) for each in chosen]


def join_rows(plan: GatherPlan, parts: list[Tensor]) -> Tensor:
    """Inverse of `split_rows`."""
    sizes: list[list[int]] = [[] for _ in parts]
    for rows, where in plan.sections:
        sizes[where + 1].append(rows)
    pieces = [iter(part.split(size)) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat([*(next(pieces[where + 1]) for _, where in plan.sections), *(part[:0] for part in parts)])
