"""Exchanges at run time: rows packed, one all-to-all, rows unpacked; the backward is the adjoint exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raypack.comm.wire import Wire
from raypack.exchange.heads.plan import Exchange, Heads, Move


def pack(exchange: Exchange, x: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """Token tensor [rows, heads, head_dim] -> wire [sum(send), head_dim], in `buffer` where one is given."""
    x = x.contiguous()
    wire = x.new_empty(sum(exchange.send), x.shape[-1]) if buffer is None else buffer
    for move in exchange.moves:
        _on_wire(move, wire).copy_(_on_tokens(move, x))
    return wire


def unpack(exchange: Exchange, wire: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Received wire [sum(receive), head_dim] (and the local rows of `x`) -> one [tokens, vectors, D] a call."""
    parts: list[list[torch.Tensor]] = [[] for _ in exchange.calls]
    for piece in exchange.gather:
        # A call without heads must be no view either: the wire's buffer may be used again before its backward.
        if vectors := exchange.calls[piece.call].vectors:
            rows = wire[piece.wire_at : piece.wire_at + piece.rows * vectors]
            parts[piece.call].append(rows.view(piece.rows, vectors, -1))
    out = []
    for call, part in zip(exchange.calls, parts, strict=True):
        if part:
            out.append(part[0] if len(part) == 1 else torch.cat(part))
        else:
            out.append(x.new_empty(call.tokens, call.vectors, x.shape[-1]))
    if exchange.local is not None:
        index, first, end = exchange.local
        out[index] = x[first:end]
    return out


def pack_calls(
    exchange: Exchange, calls: Sequence[torch.Tensor], like: torch.Tensor, buffer: torch.Tensor | None = None
) -> torch.Tensor:
    """Call tensors -> wire [sum(receive), head_dim]: what `unpack` received, sent back.

    No copy where one call's rows are the wire's already; else in `buffer` where one is given.
    """
    parts = [calls[p.call][p.row : p.row + p.rows] for p in exchange.pieces if exchange.calls[p.call].vectors]
    if not parts:
        return like.new_empty(0, like.shape[-1])
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, out=buffer)


def unpack_tokens(
    exchange: Exchange, wire: torch.Tensor, calls: Sequence[torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """Returned wire [sum(send), head_dim] -> token tensor; copies of a KV head are summed in rank order."""
    x = like.new_empty(exchange.rows, exchange.heads.per_token, like.shape[-1])
    total = None
    if exchange.copied:
        kv = 2 * exchange.heads.kv_heads
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros(exchange.rows, kv, x.shape[-1], dtype=wide, device=x.device)
    for move in exchange.moves:
        received = _on_wire(move, wire)
        if total is not None and move.is_kv:
            _add(move, received, total, exchange.heads)
        else:
            _on_tokens(move, x).copy_(received)
    if total is not None:
        x[:, exchange.heads.heads :] = total
    if exchange.local is not None:
        index, first, end = exchange.local
        x[first:end] = calls[index]
    return x


def _on_tokens(move: Move, x: torch.Tensor) -> torch.Tensor:
    """The view [count, rows, heads, D] of a contiguous token tensor that `move` names."""
    _, per_token, dim = x.shape
    stride = (move.token_step * dim, per_token * dim, dim, 1)
    return x.as_strided((move.count, move.rows, move.heads, dim), stride, x.storage_offset() + move.token_at * dim)


def _on_wire(move: Move, wire: torch.Tensor) -> torch.Tensor:
    dim = wire.shape[-1]
    stride = (move.wire_step * dim, move.wire_row * dim, dim, 1)
    return wire.as_strided((move.count, move.rows, move.heads, dim), stride, wire.storage_offset() + move.wire_at * dim)


def _add(move: Move, received: torch.Tensor, total: torch.Tensor, heads: Heads) -> None:
    """Add copies one after the other, so that the order of the sum is the order of the ranks."""
    row, vector = divmod(move.token_at, heads.per_token)
    for i in range(move.count):
        first = vector - heads.heads + i * move.token_step
        total[row : row + move.rows, first : first + move.heads] += received[i]


def _spread_heads(x: torch.Tensor, exchange: Exchange, wire: Wire, site: str) -> list[torch.Tensor]:
    """Pack, all-to-all, unpack: token tensor [rows, heads, D] -> one [tokens, vectors, D] a call."""
    sent = pack(exchange, x, wire.scratch("send", sum(exchange.send), x))
    count = sum(exchange.receive)
    out = x.new_empty(count, x.shape[-1]) if exchange.keeps_received else wire.scratch("receive", count, x)
    wire.all_to_all(out, sent, exchange.block, site, exchange.send, exchange.receive)
    return unpack(exchange, out, x)


def _bring_back(calls: Sequence[torch.Tensor], exchange: Exchange, wire: Wire, site: str) -> torch.Tensor:
    """The adjoint of `_spread_heads`."""
    like = calls[0]
    sent = pack_calls(exchange, calls, like, wire.scratch("send", sum(exchange.receive), like))
    out = wire.scratch("receive", sum(exchange.send), like)
    wire.all_to_all(out, sent, exchange.block, site, exchange.receive, exchange.send)
    return unpack_tokens(exchange, out, calls, like)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, wire: Wire, site: str) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.wire, ctx.site = exchange, wire, site
        return tuple(_spread_heads(x, exchange, wire, site))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _bring_back(grads, ctx.exchange, ctx.wire, ctx.site), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, wire: Wire, site: str, *calls: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.wire, ctx.site = exchange, wire, site
        return _bring_back(calls, exchange, wire, site)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *_spread_heads(grad, ctx.exchange, ctx.wire, ctx.site))


def to_heads(x: torch.Tensor, exchange: Exchange, wire: Wire, site: str) -> Sequence[torch.Tensor]:
    """Token tensor [rows, heads, D] -> one [tokens, vectors, D] for each of `exchange.calls`.

    Without a partner nothing moves: the rows are already the only call's. Differentiable; the backward is the
    adjoint exchange on the same group and site.
    """
    if exchange.block.width == 1:
        return [x] if exchange.calls else []
    return _ToHeads.apply(x, exchange, wire, site)


def to_tokens(calls: Sequence[torch.Tensor], exchange: Exchange, wire: Wire, site: str) -> torch.Tensor:
    """One [tokens, vectors, D] for each of `exchange.calls` -> token tensor [rows, heads, D] (see `to_heads`)."""
    if exchange.block.width == 1:
        return calls[0]
    return _ToTokens.apply(exchange, wire, site, *calls)
