"""Exchanges at run time: rows packed, one all-to-all, rows unpacked; the backward is the adjoint exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raypack.comm.wire import Wire
from raypack.exchange.heads.exchange import Exchange
from raypack.exchange.heads.rows import pack, pack_calls, unpack, unpack_tokens


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
