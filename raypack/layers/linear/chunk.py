"""Linear attention on the rows of one rank: `S_t = exp(g_t) * S_{t-1} + k_t v_t^T`, `o_t = q_t S_t` (docs/linear.md).

Three differentiable parts that add up: `inside` takes every piece of a document to start from nothing; `state_of` is
the state that a piece leaves behind; `entered` is what a state from before a piece adds to its outputs. The first is
chunked (Yang et al. 2024): quadratic inside `chunk` rows, one state across chunks.

Shapes: q [n, K, G, D] (K KV heads, G query heads each), k and v [n, K, D], all at least fp32. Log decay g: None, [K]
(one number a head) or [n, K, D] (one a channel of k). Every exponent here is a sum of log decays and thus at most 0:
nothing overflows, whatever the gates say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

BLOCK_ROWS = 1024
"""Rows whose chunks are computed at once: bounds the temporaries."""


def inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, piece: Tensor, chunk: int) -> Tensor:
    """Outputs [n, K, G, D] of pieces that each start from a state of zero.

    Args:
        piece: int64 [n], number of each row's piece; ascending.
        chunk: rows, a power of two.
    """
    return _Inside.apply(q, k, v, g, piece, chunk)


def state_of(k: Tensor, v: Tensor, g: Tensor | None) -> Tensor:
    """State [K, D, D] after the n rows of one piece that started from zero; zeros for n = 0."""
    if g is not None:
        after = (
            (len(k) - 1 - torch.arange(len(k), device=k.device))[:, None, None] * g[:, None] if g.dim() == 1 else None
        )
        if after is None:
            after = torch.cat([g[1:], g.new_zeros(g[:1].shape)]).flip(0).cumsum(0).flip(0)
        k = k * after.exp()
    return torch.einsum("nkd,nke->kde", k, v)


def entered(q: Tensor, g: Tensor | None, state: Tensor) -> Tensor:
    """What `state` [K, D, D] from before a piece adds to the outputs of its rows, [n, K, G, D]."""
    if g is not None:
        before = (
            (1 + torch.arange(len(q), device=q.device))[:, None, None] * g[:, None] if g.dim() == 1 else g.cumsum(0)
        )
        q = q * before.exp()[:, :, None]
    return torch.einsum("nkgd,kde->nkge", q, state)


class _Inside(torch.autograd.Function):
    """Block after block with the state handed on; the backward runs each block again, last to first, so that only the
    inputs and one state a block are saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, piece: Tensor, chunk: int) -> Tensor:
        out = torch.empty_like(q)
        state = k.new_zeros(k.shape[1], k.shape[2], v.shape[2])
        states = []
        with record_function("linear inside"):
            for first in range(0, len(q), BLOCK_ROWS):
                states.append(state)
                rows = _Rows.at(first, piece)
                out[rows.rows], state = _block(*rows.take(q, k, v, g), rows, state, chunk)
        ctx.save_for_backward(q, k, v, g, piece, *states)
        ctx.chunk = chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, piece, *states = ctx.saved_tensors
        gated = g is not None and g.dim() > 1
        grads = [torch.empty_like(x) for x in ((q, k, v, g) if gated else (q, k, v))]
        grad_state = torch.zeros_like(states[0]) if states else None
        for number in reversed(range(len(states))):
            rows = _Rows.at(number * BLOCK_ROWS, piece)
            parts = [x.detach().requires_grad_() for x in rows.take(q, k, v, g)[: len(grads)] if x is not None]
            state = states[number].detach().requires_grad_()
            with torch.enable_grad():
                out, after = _block(parts[0], parts[1], parts[2], parts[3] if gated else g, rows, state, ctx.chunk)
            *found, grad_state = torch.autograd.grad((out, after), (*parts, state), (grad[rows.rows], grad_state))
            for whole, part in zip(grads, found, strict=True):
                whole[rows.rows] = part
        return (*grads, *([] if gated else [None]), None, None)


@dataclass(frozen=True)
class _Rows:
    """A block of rows: their pieces, and the piece of the row before the first of them (-1: none)."""

    rows: slice
    piece: Tensor
    before: Tensor

    @staticmethod
    def at(first: int, piece: Tensor) -> _Rows:
        rows = slice(first, first + BLOCK_ROWS)
        return _Rows(rows, piece[rows], piece[first - 1 : first] if first else piece.new_full((1,), -1))

    def take(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return q[self.rows], k[self.rows], v[self.rows], g if g is None or g.dim() == 1 else g[self.rows]


@dataclass(frozen=True)
class _Decay:
    """Log decays inside chunks, [chunks, K, chunk, D], or [K, chunk, 1] where they are constant.

    `until`: of the rows up to and with this one; `after`: of those after it; `whole`: of all ([..., 1, D or 1] without
    the row axis).
    """

    until: Tensor
    after: Tensor
    whole: Tensor


def _block(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, rows: _Rows, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Outputs of one block and the state after it. `state` belongs to the piece `rows.before`."""
    n, kv_heads, group, dim = q.shape
    pad = -n % chunk
    piece = F.pad(rows.piece, (0, pad), value=-2).view(-1, chunk)
    q = _chunks(q, pad, chunk).permute(0, 2, 3, 1, 4)
    k, v = (_chunks(x, pad, chunk).transpose(1, 2) for x in (k, v))
    before = torch.cat([rows.before, piece[:-1, -1]])
    reads = (piece == before[:, None])[:, None, :, None].to(q.dtype)
    writes = (piece == piece[:, -1:])[:, None, :, None].to(q.dtype)
    passes = (piece[:, -1] == before)[:, None, None].to(q.dtype)
    decay: _Decay | None
    if g is not None and g.dim() > 1:
        out, decay = _halves(q, k, v, _chunks(g, pad, chunk).transpose(1, 2), piece)
    else:
        decay = None if g is None else _constant(g, chunk)
        out = _dense(q, k, v, g, piece)
    q = q.reshape(-1, kv_heads, group, chunk, dim)
    if decay is not None:
        q, k = q * decay.until.exp().unsqueeze(-3), k * decay.after.exp()
    added = (k * writes).transpose(-1, -2) @ v
    kept = passes if decay is None else passes * decay.whole.exp()
    starts = []
    for i in range(len(added)):
        starts.append(state)
        state = state * kept[i].unsqueeze(-1) + added[i]
    out = out + (q * reads.unsqueeze(2)) @ torch.stack(starts).unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).flatten(0, 1)[:n], state


def _chunks(x: Tensor, pad: int, chunk: int) -> Tensor:
    """[n, ...] -> [chunks, chunk, ...], zeros behind."""
    if pad:
        x = torch.cat([x, x.new_zeros(pad, *x.shape[1:])])
    return x.view(-1, chunk, *x.shape[1:])


def _constant(g: Tensor, chunk: int) -> _Decay:
    row = torch.arange(chunk, device=g.device, dtype=g.dtype)[:, None]
    g = g[:, None, None]
    return _Decay((row + 1) * g, (chunk - 1 - row) * g, chunk * g[:, 0])


def _dense(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, piece: Tensor) -> Tensor:
    """Rows of a chunk to each other, all pairs at once: decays are constant."""
    chunk = piece.shape[1]
    row = torch.arange(chunk, device=q.device)
    apart = row[:, None] - row
    seen = ((piece[:, :, None] == piece[:, None, :]) & (apart >= 0))[:, None, None]
    scores = q @ k.unsqueeze(2).transpose(-1, -2)
    if g is not None:
        scores = scores * (apart.clamp(min=0) * g[:, None, None]).exp().unsqueeze(1)
    return scores.masked_fill(~seen, 0) @ v.unsqueeze(2)


def _halves(q: Tensor, k: Tensor, v: Tensor, g: Tensor, piece: Tensor) -> tuple[Tensor, _Decay]:
    """Rows of a chunk to each other where decays differ by channel, and the decays of the chunk.

    For blocks of 2, 4, ... `chunk` rows, the second half of each looks at the first. The decay between two rows splits
    at the border of the halves into a factor of the query and one of the key, both at most 1: no division, and sums
    over few rows only.
    """
    count, kv_heads, group, chunk, dim = q.shape
    out = (q * k.unsqueeze(2)).sum(-1, keepdim=True) * v.unsqueeze(2)
    until, after, whole = g, torch.zeros_like(g), g
    half = 1
    while half < chunk:
        shape = (count, kv_heads, chunk // (2 * half), 2, half, dim)
        (until_1, until_2), (after_1, after_2) = (x.reshape(shape).unbind(3) for x in (until, after))
        whole_1, whole_2 = whole.reshape(*shape[:4], dim).unbind(3)
        p_1, p_2 = piece.view(count, 1, 1, -1, 2, half).unbind(4)
        q_2 = q.reshape(count, kv_heads, group, *shape[2:])[..., 1, :, :] * until_2.exp().unsqueeze(2)
        k_1 = k.reshape(shape)[:, :, :, 0] * after_1.exp()
        scores = q_2 @ k_1.unsqueeze(2).transpose(-1, -2)
        scores = scores.masked_fill(p_2[..., :, None] != p_1[..., None, :], 0)
        second = scores @ v.reshape(shape)[:, :, :, 0].unsqueeze(2)
        out = out + torch.stack([torch.zeros_like(second), second], 4).reshape(out.shape)
        until = torch.stack([until_1, until_2 + whole_1.unsqueeze(3)], 3).reshape(g.shape)
        after = torch.stack([after_1 + whole_2.unsqueeze(3), after_2], 3).reshape(g.shape)
        whole = whole_1 + whole_2
        half *= 2
    return out, _Decay(until, after, whole.reshape(count, kv_heads, dim))
