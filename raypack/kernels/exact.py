"""Attention in plain torch, any device and dtype: exact, and linear in tokens (time and memory) where windowed.

Documents that fit in the window go one by one through torch's own causal SDPA. Longer ones, and runs of documents of at
most `SHORT` tokens, go through `_Chunked`: blocks of consecutive query rows (`Chunk`) against only the keys that any of
them sees. Autograd over such slices would make a gradient of full size per chunk, quadratic in total, hence a Function
with its own backward. It runs each chunk again, so that nothing but q, k and v is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Both measured on CPU, 16 to 64 elements a head: below, calls cost more than masked-out work; above, the reverse.
SHORT = 16
ROWS = 128


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
    pieces = _pieces(lengths)
    if len(pieces) == 1:
        return _attend(q, k, v, pieces[0], window, sinks, scale)
    sizes = [sum(piece) for piece in pieces]
    # `split`, not slices: its backward is one cat instead of a zero-padded gradient per piece.
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), pieces, strict=True)
    return torch.cat([_attend(qi, ki, vi, piece, window, sinks, scale) for qi, ki, vi, piece in parts])


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


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None, sinks: int, scale: float
) -> Tensor:
    if len(lengths) == 1 and (window is None or lengths[0] <= window):
        return sdpa(q, k, v, None, scale)
    return _Chunked.apply(q, k, v, lengths, window, sinks, scale)


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


@dataclass(frozen=True)
class Visible:
    """Who sees whom. For each row of the stream, on the device: the first row its window shows (within its document)
    and the first row of its document, int64 [N]; and the number of sinks."""

    seen: Tensor
    start: Tensor
    sinks: int

    @staticmethod
    def of(lengths: tuple[int, ...], window: int | None, sinks: int, device: torch.device) -> Visible:
        sizes = torch.tensor(lengths, device=device)
        start = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes, output_size=sum(lengths))
        seen = start
        if window is not None:
            seen = torch.maximum(start, torch.arange(len(start), device=device) - (window - 1))
        return Visible(seen, start, sinks)

    def mask(self, query: Tensor, key: Tensor) -> Tensor:
        """True where row `query` sees row `key` (broadcast against each other)."""
        visible = key >= self.seen[query]
        if self.sinks:
            start = self.start[query]
            visible = visible | ((key >= start) & (key < start + self.sinks))
        return visible & (key <= query)


class _Chunked(torch.autograd.Function):
    """Torch's SDPA, chunk by chunk, in both directions; keys' gradients are summed over chunks at least in fp32."""

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
        ctx.save_for_backward(q, k, v)
        ctx.plan = chunks(lengths, window, sinks, ROWS)
        ctx.visible, ctx.scale = Visible.of(lengths, window, sinks, q.device), scale
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for chunk in ctx.plan:
            keys, values = (_key_rows(x, chunk) for x in (k, v))
            out[chunk.first : chunk.last] = sdpa(
                q[chunk.first : chunk.last], keys, values, _mask(ctx.visible, chunk), scale
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for chunk in ctx.plan:
            rows = slice(chunk.first, chunk.last)
            parts = (q[rows], _key_rows(k, chunk), _key_rows(v, chunk))
            queries, keys, values = (x.detach().requires_grad_() for x in parts)
            with torch.enable_grad():
                out = sdpa(queries, keys, values, _mask(ctx.visible, chunk), ctx.scale)
            grads = torch.autograd.grad(out, (queries, keys, values), grad[rows])
            grad_q[rows] = grads[0]
            _add_key_rows(grad_k, chunk, grads[1])
            _add_key_rows(grad_v, chunk, grads[2])
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Torch's attention of [queries, hq, D] over [keys, hkv, D]; `mask` [queries, keys], None = causal."""
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out.squeeze(0).transpose(0, 1)


def _key_ranges(chunk: Chunk) -> list[slice]:
    own = slice(chunk.key, chunk.last)
    return [slice(chunk.sink, chunk.sink_last), own] if chunk.sink_last > chunk.sink else [own]


def _key_rows(x: Tensor, chunk: Chunk) -> Tensor:
    """The rows of [N, ...] that are the chunk's keys."""
    ranges = _key_ranges(chunk)
    return x[ranges[0]] if len(ranges) == 1 else torch.cat([x[rows] for rows in ranges])


def _add_key_rows(total: Tensor, chunk: Chunk, part: Tensor) -> None:
    """Adjoint of `_key_rows`."""
    ranges = _key_ranges(chunk)
    for rows, piece in zip(ranges, part.split([r.stop - r.start for r in ranges]), strict=True):
        total[rows] += piece


def _mask(visible: Visible, chunk: Chunk) -> Tensor:
    """bool [queries, keys]; a query sees its own row, so no row is empty."""
    device = visible.seen.device
    query = torch.arange(chunk.first, chunk.last, device=device).unsqueeze(1)
    keys = [torch.arange(rows.start, rows.stop, device=device) for rows in _key_ranges(chunk)]
    return visible.mask(query, torch.cat(keys))
