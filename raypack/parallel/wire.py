"""Exchanges at run time: the all-to-all, its backward (the adjoint exchange), and the ledger entry."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from raypack.parallel.exchange import Exchange
from raypack.parallel.groups import Groups
from raypack.parallel.ledger import Ledger


class Wire:
    """The groups and the ledger of one rank.

    Buffers that live no longer than one exchange are kept and used again, at the largest size so far: every step has
    other sizes, and a fresh large buffer costs page faults on a CPU and fragments a GPU's memory.

    Args:
        poison: fill receive buffers with NaN first (tests: whatever is not received must never be read).

    Attributes:
        inside: the exchange or collective that this rank waits in; "" = it does not wait for others.
    """

    def __init__(self, groups: Groups | None, ledger: Ledger, *, poison: bool = False) -> None:
        self.groups = groups
        self.ledger = ledger
        self.poison = poison
        self.inside = ""
        self._kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def scratch(self, use: str, vectors: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer [vectors, head_dim] of the kind of `like`; its content is lost at the next call for this `use`."""
        key, size = (use, like.dtype, like.device), vectors * like.shape[-1]
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            kept = self._kept[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return kept[:size].view(vectors, like.shape[-1])

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Around a wait for other ranks, for the ledger's seconds. After an error `inside` says where it happened."""
        self.inside, started = name, time.perf_counter()
        yield
        self.ledger.seconds[name] += time.perf_counter() - started
        self.inside = ""

    def to_heads(self, x: torch.Tensor, exchange: Exchange, site: str) -> list[torch.Tensor]:
        """Pack, all-to-all, unpack: token tensor [rows, heads, D] -> one [tokens, vectors, D] a call."""
        sent = exchange.pack(x, self.scratch("send", sum(exchange.send), x))
        count = sum(exchange.receive)
        fresh = exchange.keeps_received
        out = x.new_empty(count, x.shape[-1]) if fresh else self.scratch("receive", count, x)
        self._all_to_all(out, sent, exchange, site, exchange.send, exchange.receive)
        return exchange.unpack(out, x)

    def to_tokens(self, calls: Sequence[torch.Tensor], exchange: Exchange, site: str) -> torch.Tensor:
        """The adjoint of `to_heads`."""
        like = calls[0]
        sent = exchange.pack_calls(calls, like, self.scratch("send", sum(exchange.receive), like))
        out = self.scratch("receive", sum(exchange.send), like)
        self._all_to_all(out, sent, exchange, site, exchange.receive, exchange.send)
        return exchange.unpack_tokens(out, calls, like)

    def _all_to_all(
        self,
        out: torch.Tensor,
        sent: torch.Tensor,
        exchange: Exchange,
        site: str,
        send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> None:
        """One unequal all-to-all of [vectors, head_dim] on the group of the exchange's block."""
        if self.groups is None:
            raise AssertionError("an exchange of several ranks needs groups")
        if self.poison:
            out.fill_(float("nan"))
        with self.waiting(site), record_function(f"exchange {site}"):
            dist.all_to_all_single(out, sent, list(receive), list(send), group=self.groups[exchange.block])
        self.ledger.count_exchange(site, exchange.block, send, sent.shape[-1] * sent.element_size())


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, wire: Wire, site: str) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.wire, ctx.site = exchange, wire, site
        return tuple(wire.to_heads(x, exchange, site))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.wire.to_tokens(grads, ctx.exchange, ctx.site), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, wire: Wire, site: str, *calls: torch.Tensor) -> torch.Tensor:
        ctx.exchange, ctx.wire, ctx.site = exchange, wire, site
        return wire.to_tokens(calls, exchange, site)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.wire.to_heads(grad, ctx.exchange, ctx.site))


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
