"""Attention by heads in a round: the two exchanges of a rank, and what its attention calls look like."""

from __future__ import annotations

from dataclasses import dataclass

from raypack.config import ModelConfig
from raypack.exchange.heads.build import build_exchange
from raypack.exchange.heads.exchange import Exchange, Heads
from raypack.exchange.layout import Layout
from raypack.kernels.packing import Packing


@dataclass(frozen=True)
class ByHeads:
    """One rank's part.

    Attributes:
        into: tokens -> heads, Q, K and V in one call.
        out: heads -> tokens (run in the `to_tokens` direction), query heads only.
        packings: documents of each call.
        kv_of_q: local KV head of each local query head, for each call.
    """

    into: Exchange
    out: Exchange
    packings: tuple[Packing, ...]
    kv_of_q: tuple[tuple[int, ...], ...]


def plan_heads(layout: Layout, rank: int, model: ModelConfig, *, full: bool) -> ByHeads:
    """Over the samples' parents (`full`) or their children."""
    into = build_exchange(layout, rank, Heads(model.heads, model.kv_heads), full=full)
    per_kv = model.heads // model.kv_heads
    return ByHeads(
        into=into,
        out=build_exchange(layout, rank, Heads(model.heads, model.kv_heads, kv_travels=False), full=full),
        packings=tuple(Packing(call.lengths) for call in into.calls),
        kv_of_q=tuple(call.kv_of_q(per_kv) for call in into.calls),
    )
