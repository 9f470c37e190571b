"""The hsap call of a rank in a round: decided on the host from the layout alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from raypack.exchange.heads.plan import Exchange
from raypack.exchange.hsap.routes import Routes, build_routes
from raypack.exchange.hsap.spread import build_spread
from raypack.exchange.hsap.transfers import STEP_ROWS
from raypack.exchange.layout import Layout
from raypack.kernels.packing import Span


@dataclass(frozen=True)
class HsapPlan:
    """One rank's hsap call.

    Attributes:
        routes: what crosses nodes, and when.
        local: each document's local rows over themselves. They are in order of position, so that "causal" among rows is
            causal in the document, whatever lies between two segments.
        kv_of_q: local KV head of each local query head.
    """

    routes: Routes
    local: tuple[Span, ...]
    kv_of_q: tuple[int, ...]


def plan_hsap(layout: Layout, rank: int, into: Exchange, step_rows: int = STEP_ROWS) -> HsapPlan | None:
    """The hsap call of `rank`, with at most `step_rows` rows a message; None where no spread sample is around it.

    Args:
        into: the exchange of Q, K and V that delivers the call.
    """
    spread = build_spread(layout, rank, step_rows)
    if spread is None:
        return None
    call = next(call for call in into.calls if call.spread)
    edges = (0, *accumulate(spread.schedule.lengths))
    local = tuple(Span(a, b, a, b, causal=True) for a, b in pairwise(edges) if b > a)
    kv_of_q = call.kv_of_q(into.heads.heads // into.heads.kv_heads)
    return HsapPlan(build_routes(spread, into.heads, into.block), local, kv_of_q)
