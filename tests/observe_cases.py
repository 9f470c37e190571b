"""Reports and records that the observe tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raypack.observe.collector import merge
from raypack.observe.metrics import Metric
from raypack.observe.record import RankReport, StepFacts, StepRecord

FACTS = StepFacts(
    epoch=0,
    first_sample=10,
    sample_count=2,
    tokens=5,
    labels=4,
    rounds=1,
    policy="joint",
    loss=2.5,
    grad_norm=0.7,
    model_flops=6e9,
    sample_ids_digest="ab12",
    plan_seconds=0.002,
    plan_bound_ratio=1.02,
    peak_flops=1e9,
    peak_source="test preset",
    plan_step_seconds=2.0,
    static_step_seconds=3.0,
    dynamic_step_seconds=2.5,
    bytes_static={"full_in": {"intra": 0, "inter": 900}},
    bytes_dynamic={"full_in": {"intra": 100, "inter": 500}},
    parent_widths={2: 1, 1: 1},
    child_widths={1: 2},
)


def report(rank: int, step: int = 0, attempt: int = 0, world: int = 2, **changes: Any) -> RankReport:
    """Rank 0 of two holds 3 tokens of the document of 5, rank 1 the other 2."""
    base = RankReport(
        rank=rank,
        node=rank // 4,
        world=world,
        attempt=attempt,
        step=step,
        tokens=3 if rank == 0 else 2,
        seconds=2.0 + rank,
        busy_seconds=1.5,
        wait_seconds=0.4,
        plan_wait_seconds=0.001 * (rank + 1),
        exchanged={("full_in", "inter"): 100, ("full_in", "intra"): 10 * rank},
        collected={("gradient_reduce", "inter"): 1000},
        phases={"forward": 1.0 + rank},
        facts=FACTS if rank == 0 else None,
    )
    return replace(base, **changes)


def record(step: int = 0, attempt: int = 0, world: int = 2, **changes: Any) -> StepRecord:
    made = merge([report(rank, step, attempt, world) for rank in range(world)])
    return made.model_copy(update=changes)


def series_names(metric: Metric) -> tuple[str, ...]:
    """The names that a scrape shows, and that a query may use."""
    if metric.kind == "histogram":
        return (f"{metric.name}_bucket", f"{metric.name}_sum", f"{metric.name}_count")
    return (metric.name,)
