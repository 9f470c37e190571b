"""Ring attention (Liu et al. 2023): causal softmax attention while keys and values of every shard pass every rank.

The next shard's keys travel while a rank computes with the ones at hand; partial outputs are merged by log-sum-exp.
Backward, gradients of K and V travel with them until they are home. One document, cut evenly: the last rank computes
with every shard, the first only with its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.baselines.neighbours import Ring

ROWS = 512
"""Query rows of one block of scores."""


def attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """This rank's outputs [rows, H, D] from q [rows, H, D], k and v [rows, K, D], H a multiple of K."""
    return _Ring.apply(q, k, v, ring)


def _blocks(q: Tensor, k: Tensor, causal: bool) -> list[tuple[slice, slice, Tensor | None]]:
    """Query rows, the keys they see, and the mask where some are not seen."""
    found = []
    for first in range(0, len(q), ROWS):
        last = min(first + ROWS, len(q))
        mask = None
        if causal:
            mask = torch.arange(last)[None, :] > torch.arange(first, last)[:, None]
        found.append((slice(first, last), slice(last if causal else len(k)), mask))
    return found


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """[H, queries, keys], from [queries, H, D] and [keys, K, D]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.transpose(0, 1) @ k.permute(1, 2, 0) * q.shape[-1] ** -0.5
    return scores if mask is None else scores.masked_fill_(mask, -torch.inf)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], len(q)), -torch.inf)
        kv = torch.stack([k, v])
        for step in range(ring.width):
            moving = ring.pass_on(kv) if step < ring.width - 1 else None
            if ring.rank >= step:
                for rows, keys, mask in _blocks(q, kv[0], causal=step == 0):
                    scores = _scores(q[rows], kv[0][keys], mask)
                    here = torch.logsumexp(scores, -1)
                    both = torch.logaddexp(lse[:, rows], here)
                    values = kv[1][keys].repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
                    part = torch.exp(scores - both[:, :, None]) @ values
                    kept = torch.exp(lse[:, rows] - both).T[:, :, None]
                    out[rows] = out[rows] * kept + part.transpose(0, 1)
                    lse[:, rows] = both
            kv = moving.wait() if moving is not None else kv
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        group, kv = q.shape[1] // k.shape[1], torch.stack([k, v])
        delta = (grad * out).sum(-1).T[:, :, None]
        grad_q, grads = torch.zeros_like(q), torch.zeros_like(kv)
        for step in range(ring.width):
            moving = ring.pass_on(kv, chained=False) if step < ring.width - 1 else None
            if ring.rank >= step:
                for rows, keys, mask in _blocks(q, kv[0], causal=step == 0):
                    k_here, v_here = (x[keys].repeat_interleave(group, 1).transpose(0, 1) for x in kv)
                    p = torch.exp(_scores(q[rows], kv[0][keys], mask) - lse[:, rows, None])
                    do = grad[rows].transpose(0, 1)
                    ds = p * (do @ v_here.transpose(1, 2) - delta[:, rows]) * q.shape[-1] ** -0.5
                    grad_q[rows] += (ds @ k_here).transpose(0, 1)
                    grads[0][keys] += _fold(ds.transpose(1, 2) @ q[rows].transpose(0, 1), group)
                    grads[1][keys] += _fold(p.transpose(1, 2) @ do, group)
            kv = moving.wait() if moving is not None else kv
            grads = ring.pass_on(grads).wait()
        return grad_q, grads[0], grads[1], None


def _fold(x: Tensor, group: int) -> Tensor:
    """[H, keys, D] -> [keys, K, D]: the query heads of a KV head summed."""
    return x.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
