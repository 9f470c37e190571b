"""L layers of a round on one rank: the states that cross shard borders, and the rows before shards that convolutions
need."""

from __future__ import annotations

from dataclasses import dataclass

from raypack.exchange.halo.plan import HaloPlan, plan_halo
from raypack.exchange.lasp2.states import StatePlan, plan_states
from raypack.layers.frame import Around


@dataclass(frozen=True)
class LinearPlan:
    """`halo` is None in models without convolutions (`model.linear_conv` = 0)."""

    states: StatePlan
    halo: HaloPlan | None


def plan_linear(around: Around) -> LinearPlan:
    """A pure function of the layout."""
    layout, rank, taps = around.layout, around.rank, around.model.linear_conv
    return LinearPlan(
        states=plan_states(layout, rank, around.segments),
        halo=plan_halo(layout, rank, around.segments, taps) if taps else None,
    )
