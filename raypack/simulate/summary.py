"""What a replay says about each policy: means, tails and totals over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raypack.simulate.replay import Planned, Replay, seconds_of


@dataclass(frozen=True)
class PolicySummary:
    """One policy over all steps.

    Attributes:
        seconds, seconds_p95: of a step, mean and 95th percentile (a step's own seconds, not interpolated).
        bound_ratio, bound_ratio_max: seconds / area bound, mean and worst step.
        mfu: FLOPs of all steps / (their seconds x ranks x peak), a fraction.
        intra_bytes, inter_bytes: sent in a step by all ranks, mean.
        waiting_ratio: share of all rank-seconds that ranks wait.
        plan_seconds, plan_seconds_max: of planning a step on this machine.
        wide_ratio: share of steps with a parent wider than a node.
        speedup: total seconds of `static` / own; None where `static` was not asked for.
        rounds: mean of a step.
    """

    policy: str
    seconds: float
    seconds_p95: float
    bound_ratio: float
    bound_ratio_max: float
    mfu: float
    intra_bytes: float
    inter_bytes: float
    waiting_ratio: float
    plan_seconds: float
    plan_seconds_max: float
    wide_ratio: float
    speedup: float | None
    rounds: float


def summarise(replay: Replay) -> list[PolicySummary]:
    """One summary a policy, in the replay's order."""
    baseline = float(seconds_of(replay.planned["static"]).sum()) if "static" in replay.planned else None
    peak = replay.topology.world * replay.cluster.peak_flops
    return [_summary(policy, planned, peak, baseline) for policy, planned in replay.planned.items()]


def _summary(policy: str, planned: Sequence[Planned], peak: float, baseline: float | None) -> PolicySummary:
    seconds, figures = seconds_of(planned), [each.figures for each in planned]
    ratios = [f.bound_ratio for f in figures]
    planning = [each.plan_seconds for each in planned]
    waiting = sum(float(f.rank_waiting.sum()) for f in figures)
    return PolicySummary(
        policy=policy,
        seconds=float(seconds.mean()),
        seconds_p95=float(np.percentile(seconds, 95, method="inverted_cdf")),
        bound_ratio=float(np.mean(ratios)),
        bound_ratio_max=max(ratios),
        mfu=sum(f.model_flops for f in figures) / (float(seconds.sum()) * peak),
        intra_bytes=float(np.mean([f.bytes_of("intra") for f in figures])),
        inter_bytes=float(np.mean([f.bytes_of("inter") for f in figures])),
        waiting_ratio=waiting / (float(seconds.sum()) * figures[0].ranks),
        plan_seconds=float(np.mean(planning)),
        plan_seconds_max=max(planning),
        wide_ratio=float(np.mean([each.wide for each in planned])),
        speedup=None if baseline is None else baseline / float(seconds.sum()),
        rounds=float(np.mean([f.rounds for f in figures])),
    )


def to_data(replay: Replay, summaries: Sequence[PolicySummary]) -> dict[str, Any]:
    """The JSON object of `raypack simulate`: the settings, `policies` (a summary each) and `steps` (one row each)."""
    trace = replay.trace
    return {
        "lengths": {
            "name": trace.name,
            "kind": trace.kind,
            "documents": trace.documents,
            "clipped": trace.clipped,
            "longest": trace.longest,
            "seed": trace.stream.start.seed,
        },
        "cluster": replay.cluster.name,
        "cluster_source": replay.cluster.source,
        "model": replay.model.name,
        "ranks": replay.topology.world,
        "nodes": list(replay.topology.nodes),
        "sync": replay.cluster.sync,
        "rank_tokens_max": replay.cluster.rank_tokens_max,
        "tokens_per_step": trace.stream.tokens_per_step,
        "budget": replay.budget,
        "policies": {each.policy: asdict(each) for each in summaries},
        "steps": [_step_data(replay, step) for step in range(replay.steps)],
    }


def _step_data(replay: Replay, step: int) -> dict[str, Any]:
    rows = {policy: _policy_data(planned[step]) for policy, planned in replay.planned.items()}
    return {"step": step, **asdict(replay.drawn[step]), "policies": rows}


def _policy_data(row: Planned) -> dict[str, Any]:
    figures = row.figures
    names = ("seconds", "bound_seconds", "plain_bound_seconds", "mfu", "bytes", "rank_tokens_max", "rounds")
    return {
        **{name: getattr(figures, name) for name in names},
        "bound_ratio": figures.bound_ratio,
        "plan_seconds": row.plan_seconds,
        "wide": row.wide,
    }
