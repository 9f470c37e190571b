"""All-gather of keys and values over all ranks, then attention with the document mask (Llama 3's context parallelism).

Cut by `zigzag_pack`, so that causal work is shared out; all keys go to all ranks, whatever the documents need.
Backward, the gradients of all keys are scattered back and summed in rank order. The ledger counts every copy to another
rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.baselines.packed import Merged, add_gradients, rows_of, spans
from benchmarks.baselines.packed_ring import Ring
from raypack.comm.collect import start_gather, swap

SITE = "kv_gather"


def attention(qkv: Tensor, heads: int, ring: Ring) -> Tensor:
    """[rows, Q + K + V heads, D] -> [rows, Q heads, D] of this rank's pieces."""
    q, kv = qkv.split([heads, qkv.shape[1] - heads], 1)
    return _Gathered.apply(q, kv, ring)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: Ring) -> Tensor:
        longest = max(map(rows_of, ring.held))
        sent = kv.new_zeros((longest, *kv.shape[1:]))
        sent[: len(kv)] = kv
        parts = start_gather(sent, ring.block, ring.wire, SITE).wait()
        merged = Merged(q)
        for rank, pieces in enumerate(ring.held):
            merged.add(q, parts[rank], spans(ring.held[ring.at(0)], pieces), q.shape[-1] ** -0.5)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, parts, out, merged.lse)
        ctx.ring, ctx.rows = ring, len(kv)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, parts, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        gradients = torch.zeros(parts.shape, dtype=lse.dtype, device=q.device)
        for rank, pieces in enumerate(ring.held):
            kinds = spans(ring.held[ring.at(0)], pieces)
            add_gradients((grad, q, out, lse), parts[rank], kinds, q.shape[-1] ** -0.5, grad_q, gradients[rank])
        sizes = [parts.shape[1]] * len(parts)
        returned = swap(gradients.to(parts.dtype).flatten(0, 1), sizes, sizes, ring.block, ring.wire, SITE)
        total = returned.view(parts.shape).to(lse.dtype).sum(0)[: ctx.rows]
        return grad_q.to(q.dtype), total.to(q.dtype), None
