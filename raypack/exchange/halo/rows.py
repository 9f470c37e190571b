"""Rows before a shard that a short causal convolution needs: up to `taps - 1` of the same document (docs/linear.md).

Where shards are shorter than that they lie several ranks back. Each travels from the rank that holds it straight to the
one that needs it, in one all-to-all on the group of the component of children; the backward is its adjoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.comm.collect import swap
from raypack.comm.wire import Wire
from raypack.exchange.halo.plan import HaloPlan

OP = "conv_halo"


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
        received = swap(x[on_device(plan, x.device, "rows")], plan.send, plan.receive, plan.block, wire, OP)
        return received[on_device(plan, x.device, "order")]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        plan: HaloPlan = ctx.plan
        sent = torch.empty_like(grad)
        sent[on_device(plan, grad.device, "order")] = grad
        returned = swap(sent, plan.receive, plan.send, plan.block, ctx.wire, OP)
        total = returned.new_zeros((ctx.rows, grad.shape[1]), dtype=torch.promote_types(grad.dtype, torch.float32))
        rows = on_device(plan, grad.device, "rows").split(list(plan.send))
        for where, part in zip(rows, returned.split(list(plan.send)), strict=True):
            if len(where):
                total[where] += part  # a rank asks for a row once, so no index comes twice
        return total.to(grad.dtype), None, None


def on_device(plan: HaloPlan, device: torch.device, name: str) -> Tensor:
    """`rows`, `order` or `since` of a plan as a tensor, made once a round and device."""
    return plan.kept.keep((name, device), lambda: torch.from_numpy(getattr(plan, name)).to(device, non_blocking=True))
