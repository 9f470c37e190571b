"""LASP-1 in the order of its authors' code (OpenNLPLab/LASP): receive the state, do the shard's attention, send it on.

All of a shard's attention stands in the chain, forward and backward, also in the fused kernels; `lasp1` is the kinder
reading, where only a sum does. One document, cut evenly. Shapes as `raypack.layers.linear.chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.baselines.lasp1 import whole_decay
from benchmarks.baselines.neighbours import Ring
from raypack.layers.linear.chunk import entered, inside, state_of

#: incoming state, inputs -> outputs, state that leaves the shard
Compute = Callable[..., tuple[Tensor, Tensor]]


def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, ring: Ring, chunk: int) -> Tensor:
    """This rank's outputs [rows, K, G, D]; g: None or [K], log decay of a token."""
    piece = torch.zeros(len(q), dtype=torch.int64, device=q.device)

    def compute(state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = inside(q, k, v, g, piece, chunk) + entered(q, g, state)
        return out, state_of(k, v, g) + whole_decay(g, len(k)) * state

    return in_order(compute, k.new_zeros(k.shape[1], k.shape[2], v.shape[2]), ring, q, k, v)


def in_order(compute: Compute, nothing: Tensor, ring: Ring, *inputs: Tensor) -> Tensor:
    """`compute`, rank after rank; `nothing` = the state that enters the first."""
    return _InOrder.apply(compute, nothing, ring, *inputs)


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, nothing: Tensor, ring: Ring, *inputs: Tensor) -> Tensor:
        state = ring.receive(nothing, ring.rank - 1) if ring.rank else nothing.clone()
        ctx.ring, ctx.inputs = ring, [x.detach().requires_grad_() for x in (state, *inputs)]
        with torch.enable_grad():
            ctx.made = compute(*ctx.inputs)
        if ring.rank < ring.width - 1:
            ring.send(ctx.made[1].detach(), ring.rank + 1)
        ring.steps += ring.width - 1
        return ctx.made[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        like = ctx.made[1]
        leaving = ring.receive(like.detach(), ring.rank + 1) if ring.rank < ring.width - 1 else torch.zeros_like(like)
        state, *grads = torch.autograd.grad(ctx.made, ctx.inputs, (grad, leaving))
        if ring.rank:
            ring.send(state, ring.rank - 1)
        ring.steps += ring.width - 1
        return None, None, None, *grads
