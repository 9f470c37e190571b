"""Exchanges at run time: the all-to-all, its backward (the adjoint exchange), and the ledger entry."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from raypack.parallel.exchange import Exchange
from raypack.parallel.groups import Groups
from raypack.parallel.ledger import Ledger


class Wire:
    """The groups and the ledger of one rank. `poison` fills receive buffers with NaN first (tests)."""

    def __init__(self, groups: Groups | None, ledger: Ledger, *, poison: bool = False) -> None:
        self.groups = groups
        self.ledger = ledger
        self.poison = poison

    def all_to_all(self, wire: torch.Tensor, exchange: Exchange, site: str, *, to_heads: bool) -> torch.Tensor:
        """One unequal all-to-all of [vectors, head_dim] on the group of the exchange's block."""
        if self.groups is None:
            raise AssertionError("an exchange of several ranks needs groups")
        send, receive = (exchange.send, exchange.receive) if to_heads else (exchange.receive, exchange.send)
        out = wire.new_empty(sum(receive), wire.shape[-1])
        if self.poison:
            out.fill_(float("nan"))
        started = time.perf_counter()
        dist.all_to_all_single(out, wire, list(receive), list(send), group=self.groups[exchange.block])
        self.ledger.seconds[site] += time.perf_counter() - started
        self.ledger.count_exchange(site, exchange.block, send, wire.shape[-1] * wire.element_size())
        return out


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, wire: Wire, site: str) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.wire, ctx.site = exchange, wire, site
        received = wire.all_to_all(exchange.pack(x), exchange, site, to_heads=True)
        return tuple(exchange.unpack(received, x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        sent = exchange.pack_calls(grads, grads[0])
        returned = ctx.wire.all_to_all(sent, exchange, ctx.site, to_heads=False)
        return exchange.unpack_tokens(returned, grads, grads[0]), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, wire: Wire, site: str, *calls: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.wire, ctx.site = exchange, wire, site
        returned = wire.all_to_all(exchange.pack_calls(calls, calls[0]), exchange, site, to_heads=False)
        return exchange.unpack_tokens(returned, calls, calls[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        received = ctx.wire.all_to_all(exchange.pack(grad), exchange, ctx.site, to_heads=True)
        return (None, None, None, *exchange.unpack(received, grad))


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
