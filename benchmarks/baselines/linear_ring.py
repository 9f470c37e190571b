"""Linear attention by a ring of K and V, as ring attention does it: keys and values of every shard pass every rank.

Each rank turns what passes into the part of the state that enters its shard (right product first), so that compute is
that of LASP; what differs is what travels. Backward, gradients of K and V travel with them until they are home. One
document, cut evenly. Shapes as `raypack.layers.linear.chunk`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.baselines.lasp1 import whole_decay
from benchmarks.baselines.neighbours import Ring
from raypack.layers.linear.chunk import entered, inside, state_of


def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, ring: Ring, chunk: int) -> Tensor:
    """This rank's outputs [rows, K, G, D]; g: None or [K], log decay of a token."""
    piece = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    return inside(q, k, v, g, piece, chunk) + entered(q, g, _Incoming.apply(k, v, g, ring))


class _Incoming(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, g: Tensor | None, ring: Ring) -> Tensor:
        ctx.ring, ctx.g = ring, g
        ctx.save_for_backward(k, v)
        state = k.new_zeros(k.shape[1], k.shape[2], v.shape[2])
        decay: Tensor | float = 1.0
        kv = torch.stack([k, v])
        for step in range(1, ring.width):
            kv = ring.pass_on(kv).wait()
            if ring.rank >= step:
                state = state + decay * state_of(kv[0], kv[1], g)
                decay = decay * whole_decay(g, len(k))
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ring: Ring = ctx.ring
        kv = torch.stack(ctx.saved_tensors)
        decay: Tensor | float = 1.0
        grads = torch.zeros_like(kv)
        for step in range(1, ring.width):
            kv, grads = ring.pass_on(torch.stack([kv, grads])).wait()
            if ring.rank >= step:
                k, v = (x.detach().requires_grad_() for x in kv)
                with torch.enable_grad():
                    state = state_of(k, v, ctx.g)
                grads = grads + torch.stack(torch.autograd.grad(state, (k, v), decay * grad))
                decay = decay * whole_decay(ctx.g, len(k))
        grads = ring.pass_on(grads).wait()
        return grads[0], grads[1], None, None
