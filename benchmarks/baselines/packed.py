"""Packs of documents over ranks, as other methods cut them, and what every rank then attends to.

All methods here and in `benchmarks.hsap_methods` compute with `raypack.kernels.partial`, so that they differ only
in who computes what and in what travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.kernels import partial
from raypack.kernels.packing import Span


class Piece(NamedTuple):
    """Tokens [low, high) of a document."""

    document: int
    low: int
    high: int


def contiguous(lengths: Sequence[int], ranks: int) -> list[list[Piece]]:
    """The pack in equal shards, one after another."""
    return [_between(lengths, a, b) for a, b in pairwise(_edges(sum(lengths), ranks))]


def zigzag_pack(lengths: Sequence[int], ranks: int) -> list[list[Piece]]:
    """The pack in 2 x ranks chunks; rank i has chunks i and 2 x ranks - 1 - i (Llama 3's context parallelism)."""
    chunks = [_between(lengths, a, b) for a, b in pairwise(_edges(sum(lengths), 2 * ranks))]
    return [chunks[i] + chunks[2 * ranks - 1 - i] for i in range(ranks)]


def zigzag_documents(lengths: Sequence[int], ranks: int) -> list[list[Piece]]:
    """Every document in 2 x ranks chunks, dealt likewise (zig-zag ring attention for packed documents)."""
    held: list[list[Piece]] = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        chunks = [Piece(document, a, b) for a, b in pairwise(_edges(length, 2 * ranks))]
        for i in range(ranks):
            held[i] += [piece for piece in (chunks[i], chunks[2 * ranks - 1 - i]) if piece.high > piece.low]
    return held


def _edges(tokens: int, parts: int) -> list[int]:
    return [tokens * i // parts for i in range(parts + 1)]


def _between(lengths: Sequence[int], low: int, high: int) -> list[Piece]:
    starts = (0, *accumulate(lengths))
    found = [Piece(d, max(low - a, 0), min(high - a, b - a)) for d, (a, b) in enumerate(pairwise(starts))]
    return [piece for piece in found if piece.high > piece.low]


def rows_of(pieces: Sequence[Piece]) -> int:
    return sum(piece.high - piece.low for piece in pieces)


def spans(queries: Sequence[Piece], keys: Sequence[Piece]) -> tuple[list[Span], list[Span]]:
    """(causal, full) spans of rows `queries` over rows `keys`: only pairs of one document that its mask shows.

    Two pieces are the same, or one lies before the other.
    """
    causal, full = [], []
    key_rows = list(accumulate((k.high - k.low for k in keys), initial=0))
    row = 0
    for query in queries:
        end = row + query.high - query.low
        for key, (a, b) in zip(keys, pairwise(key_rows), strict=True):
            if key == query:
                causal.append(Span(row, end, a, b, causal=True))
            elif key.document == query.document and key.high <= query.low:
                full.append(Span(row, end, a, b))
        row = end
    return causal, full


class Merged:
    """Running output and log-sum-exp of this rank's queries."""

    def __init__(self, q: Tensor) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros(q.shape, dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)

    def add(self, q: Tensor, kv: Tensor, kinds: tuple[list[Span], list[Span]], scale: float) -> None:
        """Attend to `kv` [rows, K and V heads, D] too."""
        k, v = kv.chunk(2, 1)
        for each in kinds:
            for span, part in zip(each, partial.forward(q, k, v, each, scale) if each else [], strict=True):
                rows = slice(span.query, span.query_end)
                partial.merge(self.out[rows], self.lse[rows], part)


def add_gradients(
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    kv: Tensor,
    kinds: tuple[list[Span], list[Span]],
    scale: float,
    grad_q: Tensor,
    grad_kv: Tensor,
) -> None:
    """Add the gradients of these spans; `saved` = grad, q, out, lse of this rank's queries."""
    grad, q, out, lse = saved
    k, v = kv.chunk(2, 1)
    grad_k, grad_v = grad_kv.chunk(2, 1)
    for each in kinds:
        if each:
            partial.backward(grad, q, k, v, out, lse, each, scale, grad_q, grad_k, grad_v)


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Causal attention of packed documents on one rank, by the kernel that all methods share."""
    edges = (0, *accumulate(lengths))
    local = [Span(a, b, a, b, causal=True) for a, b in pairwise(edges) if b > a]
    if not local or not q.shape[1]:
        return q + (k[:0].sum() + v[:0].sum())
    return _Attend.apply(q, torch.cat([k, v], 1), local)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, local: list[Span]) -> Tensor:
        merged, ctx.local = Merged(q), local
        merged.add(q, kv, (local, []), q.shape[-1] ** -0.5)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, merged.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, kv, out, lse = ctx.saved_tensors
        grads = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, kv)]
        add_gradients((grad, q, out, lse), kv, (ctx.local, []), q.shape[-1] ** -0.5, *grads)
        return grads[0].to(q.dtype), grads[1].to(kv.dtype), None
