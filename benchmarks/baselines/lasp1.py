"""LASP-1 (Sun et al. 2024): the state of linear attention goes from rank to rank, forward and backward.

A rank computes inside its shard, waits for the state of the rank before, decays it, adds its own and sends it on:
`width - 1` dependent messages a direction. Kinder than as published: a shard's own state is ready before the message
comes, so that only the sum is in the chain. One document, cut evenly. Shapes as `raypack.layers.linear.chunk`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.baselines.neighbours import Ring
from raypack.layers.linear.chunk import entered, inside, state_of


def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, ring: Ring, chunk: int) -> Tensor:
    """This rank's outputs [rows, K, G, D]; g: None or [K], log decay of a token."""
    piece = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    state = state_of(k, v, g)
    return inside(q, k, v, g, piece, chunk) + entered(q, g, incoming(state, g, len(k), ring))


def incoming(state: Tensor, g: Tensor | None, rows: int, ring: Ring) -> Tensor:
    """The state that enters this rank's shard, from what each rank's `rows` rows leave behind, [K, D, D]."""
    return _Incoming.apply(state, g, rows, ring)


def whole_decay(g: Tensor | None, rows: int) -> Tensor | float:
    """Decay over a shard, to multiply states with."""
    return 1.0 if g is None else (rows * g).exp()[:, None, None]


class _Incoming(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, g: Tensor | None, rows: int, ring: Ring) -> Tensor:
        ctx.ring, ctx.decay = ring, whole_decay(g, rows)
        incoming = ring.receive(state, ring.rank - 1) if ring.rank else torch.zeros_like(state)
        if ring.rank < ring.width - 1:
            ring.send(state + ctx.decay * incoming, ring.rank + 1)
        ring.steps += ring.width - 1
        return incoming

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ring: Ring = ctx.ring
        leaving = ring.receive(grad, ring.rank + 1) if ring.rank < ring.width - 1 else torch.zeros_like(grad)
        if ring.rank:
            ring.send(grad + ctx.decay * leaving, ring.rank - 1)
        ring.steps += ring.width - 1
        return leaving, None, None, None
