"""Attention in plain torch, any device and dtype: exact, and linear in tokens (time and memory) where windowed.

Full attention: documents of more than `SHORT` tokens go one by one through torch's own causal SDPA; runs of shorter
ones, and everything windowed, go through `_Chunked`: blocks of consecutive query rows (`Chunk`) against only the keys
that any of them sees. Autograd over such slices would make a gradient of full size per chunk, quadratic in total, hence
a Function with its own backward, which recomputes the probabilities from the saved log-sum-exp as FlashAttention does
(Dao et al. 2022, section 3.1; Dao 2023, algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SHORT = 256
CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Chunk:
    """Query rows `[first, last)` of a packed stream and the key rows that they see: `[sink, sink_last)`, the sinks of
    the document that holds row `first`, and `[key, last)`. `sink_last <= key`, so no key comes twice."""

    first: int
    last: int
    key: int
    sink: int
    sink_last: int


def attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None, sinks: int, scale: float
) -> Tensor:
    """As `kernels.attention`, for N > 0, hq > 0 a multiple of hkv, and lengths that are positive and add up to N."""
    if window is not None:
        return _Chunked.apply(q, k, v, lengths, window, sinks, scale)
    pieces = _pieces(lengths)
    if len(pieces) == 1:
        return _full(q, k, v, pieces[0], scale)
    sizes = [sum(piece) for piece in pieces]
    # `split`, not slices: its backward is one cat instead of a zero-padded gradient per piece.
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), pieces, strict=True)
    return torch.cat([_full(qi, ki, vi, piece, scale) for qi, ki, vi, piece in parts])


def _pieces(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Consecutive documents that are computed together: a long one alone, neighbouring short ones as one run."""
    pieces: list[tuple[int, ...]] = []
    run: list[int] = []
    for length in lengths:
        if length <= SHORT:
            run.append(length)
            continue
        if run:
            pieces.append(tuple(run))
            run = []
        pieces.append((length,))
    return [*pieces, tuple(run)] if run else pieces


def _full(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    if len(lengths) > 1:
        return _Chunked.apply(q, k, v, lengths, None, 0, scale)
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


@lru_cache(maxsize=64)
def chunks(lengths: tuple[int, ...], window: int | None, sinks: int, rows: int) -> tuple[Chunk, ...]:
    """Cut the packed stream into blocks of `rows` query rows. Pure; the last block may be shorter."""
    offsets = (0, *accumulate(lengths))
    out, document = [], 0
    for first in range(0, offsets[-1], rows):
        while offsets[document + 1] <= first:
            document += 1
        start = offsets[document]
        key = start if window is None else max(start, first - window + 1)
        out.append(Chunk(first, min(first + rows, offsets[-1]), key, start, min(start + sinks, key)))
    return tuple(out)


def chunk_rows(heads: int, window: int | None, sinks: int) -> int:
    """Query rows of a chunk: at most 256, fewer where the scores of all heads would exceed `CHUNK_ELEMENTS`."""
    rows = SHORT
    while rows > 16 and heads * rows * (rows + (SHORT if window is None else window) + sinks) > CHUNK_ELEMENTS:
        rows //= 2
    return rows


@dataclass(frozen=True)
class Visible:
    """Who sees whom. For each row of the stream, on the device: the first row its window shows (within its document),
    the first row of its document, and one past its document's last sink. int64 [N]."""

    seen: Tensor
    start: Tensor
    sink_last: Tensor

    @staticmethod
    def of(lengths: tuple[int, ...], window: int | None, sinks: int, device: torch.device) -> Visible:
        sizes = torch.tensor(lengths, device=device)
        start = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes, output_size=sum(lengths))
        seen = start
        if window is not None:
            seen = torch.maximum(start, torch.arange(len(start), device=device) - (window - 1))
        return Visible(seen, start, start + sinks)

    def mask(self, query: Tensor, key: Tensor) -> Tensor:
        """True where row `query` sees row `key` (broadcast against each other)."""
        in_window = key >= self.seen[query]
        sink = (key >= self.start[query]) & (key < self.sink_last[query])
        return (key <= query) & (in_window | sink)


class _Chunked(torch.autograd.Function):
    """Scores, probabilities and all sums in promote_types(dtype, float32); only the results are rounded."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: tuple[int, ...],
        window: int | None,
        sinks: int,
        scale: float,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        plan = chunks(lengths, window, sinks, chunk_rows(q.shape[1], window, sinks))
        visible = Visible.of(lengths, window, sinks, q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((k.shape[1], q.shape[1] // k.shape[1], q.shape[0]), dtype=wide, device=q.device)
        for chunk in plan:
            scores = _scores(q, k, chunk, visible, scale, wide)
            here = torch.logsumexp(scores, -1, keepdim=True)
            lse[:, :, chunk.first : chunk.last] = here.view(*lse.shape[:2], -1)
            probabilities = scores.sub_(here).exp_()
            _put(out, chunk, torch.bmm(probabilities, _keys(v, chunk, wide)))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.visible, ctx.scale = plan, visible, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wide, kv_heads = lse.dtype, k.shape[1]
        grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # Chunks overlap in their keys: these sums stay wide until the end.
        grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for chunk in ctx.plan:
            probabilities = _scores(q, k, chunk, ctx.visible, ctx.scale, wide)
            probabilities.sub_(lse[:, :, chunk.first : chunk.last].reshape(kv_heads, -1, 1)).exp_()
            grad_out = _queries(grad, kv_heads, chunk, wide)
            _add_keys(grad_v, chunk, torch.bmm(probabilities.transpose(1, 2), grad_out))
            grad_scores = torch.bmm(grad_out, _keys(v, chunk, wide).transpose(1, 2))
            grad_scores.sub_((grad_out * _queries(out, kv_heads, chunk, wide)).sum(-1, keepdim=True))
            grad_scores.mul_(probabilities).mul_(ctx.scale)
            _put(grad_q, chunk, torch.bmm(grad_scores, _keys(k, chunk, wide)))
            _add_keys(grad_k, chunk, torch.bmm(grad_scores.transpose(1, 2), _queries(q, kv_heads, chunk, wide)))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _key_ranges(chunk: Chunk) -> Iterator[tuple[int, int]]:
    if chunk.sink_last > chunk.sink:
        yield chunk.sink, chunk.sink_last
    yield chunk.key, chunk.last


def _keys(x: Tensor, chunk: Chunk, wide: torch.dtype) -> Tensor:
    """The chunk's key rows of [N, hkv, D], as [hkv, keys, D]."""
    return torch.cat([x[first:last].to(wide) for first, last in _key_ranges(chunk)]).transpose(0, 1)


def _add_keys(total: Tensor, chunk: Chunk, part: Tensor) -> None:
    """Add [hkv, keys, D] to the chunk's key rows of [N, hkv, D]."""
    done = 0
    for first, last in _key_ranges(chunk):
        total[first:last] += part[:, done : done + last - first].transpose(0, 1)
        done += last - first


def _queries(x: Tensor, kv_heads: int, chunk: Chunk, wide: torch.dtype) -> Tensor:
    """The chunk's rows of [N, hq, D], as [hkv, (hq / hkv) * rows, D]: the heads that share keys in one product."""
    rows = x[chunk.first : chunk.last].unflatten(1, (kv_heads, -1))
    return rows.permute(1, 2, 0, 3).to(wide).reshape(kv_heads, -1, x.shape[-1])


def _put(x: Tensor, chunk: Chunk, part: Tensor) -> None:
    """Inverse of `_queries`: write [hkv, (hq / hkv) * rows, D] into the chunk's rows of [N, hq, D]."""
    rows = part.unflatten(1, (-1, chunk.last - chunk.first)).permute(2, 0, 1, 3)
    x[chunk.first : chunk.last] = rows.flatten(1, 2).to(x.dtype)


def _scores(q: Tensor, k: Tensor, chunk: Chunk, visible: Visible, scale: float, wide: torch.dtype) -> Tensor:
    """Masked scores [hkv, (hq / hkv) * rows, keys]: a query's own row is always visible, so no row is all -inf."""
    kv_heads = k.shape[1]
    scores = torch.bmm(_queries(q, kv_heads, chunk, wide), _keys(k, chunk, wide).transpose(1, 2)).mul_(scale)
    key = torch.cat([torch.arange(first, last, device=q.device) for first, last in _key_ranges(chunk)])
    query = torch.arange(chunk.first, chunk.last, device=q.device).unsqueeze(1)
    masked = scores.unflatten(1, (-1, chunk.last - chunk.first)).masked_fill_(~visible.mask(query, key), -math.inf)
    return masked.flatten(1, 2)
