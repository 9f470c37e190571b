"""F layers of a round on one rank: exchanged by heads, spread over nodes, or with gathered keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from raypack.exchange.gathered.plan import GatherPlan, gathers, plan_gather
from raypack.exchange.heads.plan import ByHeads, plan_heads
from raypack.exchange.hsap.plan import HsapPlan, plan_hsap
from raypack.kernels.packing import Packing
from raypack.layers.frame import Around


@dataclass(frozen=True)
class Gathered:
    """Documents whose K and V are gathered: who sends what, and the packed queries and keys of each block of
    `plan.blocks`."""

    plan: GatherPlan
    queries: tuple[Packing, ...]
    keys: tuple[Packing, ...]


@dataclass(frozen=True)
class FullPlan:
    """One rank's F layers.

    Attributes:
        by_heads: without the rows of `gathered`.
        hsap: what the spread call does besides; None where no call is spread.
        gathered: None where there are none around this rank.
    """

    by_heads: ByHeads
    hsap: HsapPlan | None
    gathered: Gathered | None


def plan_full(around: Around) -> FullPlan:
    """A pure function of the layout."""
    layout, rank, attentions = around.layout, around.rank, around.layout.attentions
    gathered = _gathered(around) if "kv_gather" in attentions else None
    if gathered is None:
        by_heads = around.by_heads(full=True)
    else:
        layout = layout.keeping(lambda cohort: not gathers(cohort))
        by_heads = plan_heads(layout, rank, around.model, full=True)
    hsap = plan_hsap(layout, rank, by_heads.into) if "hsap" in attentions else None
    return FullPlan(by_heads, hsap, gathered)


def _gathered(around: Around) -> Gathered | None:
    plan = plan_gather(around.layout, around.rank)
    if plan is None:
        return None
    queries, keys = ([Packing(getattr(block, name)) for block in plan.blocks] for name in ("queries", "keys"))
    return Gathered(plan, tuple(queries), tuple(keys))
