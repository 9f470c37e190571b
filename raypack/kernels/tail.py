"""Causal attention of the last tokens of documents over all their tokens, in plain torch, any device and dtype.

Query i of m sees the first n - m + i + 1 of a document's n keys. Blocks of query rows go through torch's SDPA against
the keys that any of them sees, so memory is linear in tokens; the backward runs each block again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.kernels import exact as kernels_exact
from raypack.kernels.exact import ROWS, sdpa


def attention(q: Tensor, k: Tensor, v: Tensor, queries: tuple[int, ...], keys: tuple[int, ...], scale: float) -> Tensor:
    """As `kernels.attention` without a window: `queries` and `keys` are the rows of each document in q and in k and v,
    all positive, `queries[i] <= keys[i]`."""
    pieces = _pieces(queries, keys)
    parts = zip(
        q.split([sum(m) for m, _ in pieces]),
        *(x.split([sum(n) for _, n in pieces]) for x in (k, v)),
        pieces,
        strict=True,
    )
    out = []
    for qi, ki, vi, (m, n) in parts:
        if m == n:
            out.append(kernels_exact.attention(qi, ki, vi, m, None, 0, scale))
        else:
            out.append(_Tail.apply(qi, ki, vi, scale))
    return torch.cat(out)


def _pieces(queries: tuple[int, ...], keys: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Documents with keys of their own each alone, neighbouring complete ones together."""
    pieces: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for m, n in zip(queries, keys, strict=True):
        if m == n and pieces and pieces[-1][0] == pieces[-1][1]:
            whole = (*pieces[-1][0], m)
            pieces[-1] = (whole, whole)
        else:
            pieces.append(((m,), (n,)))
    return pieces


class _Tail(torch.autograd.Function):
    """One document; keys' gradients are summed over blocks at least in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for first in range(0, len(q), ROWS):
            mask = _mask(len(q), len(k), first, q.device)
            rows = slice(first, first + ROWS)
            out[rows] = sdpa(q[rows], k[: mask.shape[1]], v[: mask.shape[1]], mask, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for first in range(0, len(q), ROWS):
            mask = _mask(len(q), len(k), first, q.device)
            rows, seen = slice(first, first + ROWS), slice(mask.shape[1])
            queries, keys, values = (x.detach().requires_grad_() for x in (q[rows], k[seen], v[seen]))
            with torch.enable_grad():
                out = sdpa(queries, keys, values, mask, ctx.scale)
            grad_q[rows], of_k, of_v = torch.autograd.grad(out, (queries, keys, values), grad[rows])
            grad_k[seen] += of_k
            grad_v[seen] += of_v
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _mask(queries: int, keys: int, first: int, device: torch.device) -> Tensor:
    """bool [query rows of the block that begins at `first`, the keys that any of them sees]."""
    last = min(first + ROWS, queries)
    shift = keys - queries
    row = torch.arange(first + shift, last + shift, device=device)
    return torch.arange(last + shift, device=device) <= row[:, None]
