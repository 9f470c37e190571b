"""Ring attention over packed documents: keys and values of every rank pass every rank, whether it needs them or not.

With `contiguous` shards this is the ring over everything (Liu et al. 2023); with `zigzag_documents` the zig-zag ring
for variable lengths (ring-flash-attention), which shares the causal work out evenly. A rank skips the compute that the
document mask does not show. The next keys travel while a rank computes; backward, gradients travel with them until
they are home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.baselines.packed import Merged, Piece, add_gradients, rows_of, spans
from raypack.comm.wire import Wire
from raypack.plan.topology import Block

SITE = "ring"


@dataclass(frozen=True)
class Ring:
    """The ranks of a block in a ring, and what each holds."""

    rank: int
    block: Block
    held: Sequence[Sequence[Piece]]
    wire: Wire

    def at(self, step: int) -> int:
        """Index of the rank whose keys are here after `step` steps."""
        return (self.rank - self.block.first - step) % self.block.width

    def pass_on(self, x: Tensor, step: int) -> tuple[Tensor, list[dist.Work], Tensor]:
        """Send `x`, which came in `step` steps, on, and receive what comes next; wait before reading it."""
        assert self.wire.groups is not None
        first, width, me = self.block.first, self.block.width, self.rank - self.block.first
        following, before = first + (me + 1) % width, first + (me - 1) % width
        x = x.contiguous()
        out = x.new_empty(rows_of(self.held[self.at(step + 1)]), *x.shape[1:])
        group = self.wire.groups[self.block]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, following, group), dist.P2POp(dist.irecv, out, before, group)]
        )
        vectors = x.shape[0] * x.shape[1]
        self.wire.ledger.count_exchange(SITE, Block(following, 1), [vectors], x.shape[2] * x.element_size())
        return out, works, x


def attention(qkv: Tensor, heads: int, ring: Ring) -> Tensor:
    """[rows, Q + K + V heads, D] -> [rows, Q heads, D] of this rank's pieces."""
    q, kv = qkv.split([heads, qkv.shape[1] - heads], 1)
    return _Ring.apply(q, kv, ring)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: Ring) -> Tensor:
        merged, moving, mine = Merged(q), kv.contiguous(), ring.held[ring.at(0)]
        for step in range(ring.block.width):
            last = step == ring.block.width - 1
            following = None if last else ring.pass_on(moving, step)
            merged.add(q, moving, spans(mine, ring.held[ring.at(step)]), q.shape[-1] ** -0.5)
            if following is not None:
                moving = _wait(following)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, merged.lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, kv, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        mine, moving = ring.held[ring.at(0)], kv.contiguous()
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        gradients = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
        for step in range(ring.block.width):
            last = step == ring.block.width - 1
            following = None if last else ring.pass_on(moving, step)
            kinds = spans(mine, ring.held[ring.at(step)])
            add_gradients((grad, q, out, lse), moving, kinds, q.shape[-1] ** -0.5, grad_q, gradients)
            # They go on with their keys; after the last step this brings them home.
            gradients = _wait(ring.pass_on(gradients.to(kv.dtype), step)).to(lse.dtype)
            if following is not None:
                moving = _wait(following)
        return grad_q.to(q.dtype), gradients.to(kv.dtype), None


def _wait(following: tuple[Tensor, list[dist.Work], Tensor]) -> Tensor:
    for work in following[1]:
        work.wait()
    return following[0]
