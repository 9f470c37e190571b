"""Recording and alert rules. An alert is a value and a limit, so that a test can also ask for the value itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dashboards import limits
from dashboards.panels import INTER
from raypack.observe.record import PLANNED_COLLECTIVES

# Windows are long against a step: at scale one takes tens of seconds.
WINDOW = "10m"
OWN, STATIC = (f'raypack_modelled_seconds_total{{plan="{plan}"}}' for plan in ("own", "static"))


@dataclass(frozen=True)
class Recording:
    """A precomputed series."""

    name: str
    expr: str


@dataclass(frozen=True)
class Alert:
    """Fires where `value > limit` has held for `wait`."""

    name: str
    value: str
    limit: float
    wait: str
    severity: str
    summary: str
    what_to_do: str

    @property
    def expr(self) -> str:
        return f"({self.value}) > {self.limit:g}"


def _growth(metric: str, by: str = "run") -> str:
    return f"sum by ({by}) (rate({metric}[{WINDOW}]))"


def _sent(*matchers: str) -> str:
    """As `panels.sent`: bytes that depend on the plan."""
    planned = f'op=~"{"|".join(PLANNED_COLLECTIVES)}"'
    exchanged = _growth(f"raypack_all_to_all_bytes_total{{{', '.join(matchers)}}}")
    collected = _growth(f"raypack_collective_bytes_total{{{', '.join((planned, *matchers))}}}")
    return f"({exchanged} + {collected})"


RECORDINGS = (
    Recording("run:raypack_tokens:rate10m", _growth("raypack_tokens_total")),
    Recording(
        "run:raypack_step_seconds:mean10m",
        f"{_growth('raypack_step_seconds_sum')} / {_growth('raypack_step_seconds_count')}",
    ),
    Recording(
        "run:raypack_inter_bytes:ratio10m",
        f"{_sent(INTER)} / {_sent()}",
    ),
    Recording(
        "run:raypack_plan_late:ratio10m",
        f"{_growth('raypack_plan_late_seconds_total')} / {_growth('raypack_step_seconds_sum')}",
    ),
    Recording(
        "rank:raypack_busy:ratio10m",
        f"avg by (run, rank, node) (avg_over_time(raypack_rank_busy_seconds[{WINDOW}]))"
        f" / on (run) group_left () avg by (run) (avg_over_time(raypack_rank_busy_seconds[{WINDOW}]))",
    ),
    # 1 = the cost model is right; what counts is whether it changes.
    Recording(
        "run:raypack_measured:ratio10m",
        f"{_growth('raypack_step_seconds_sum')} / {_growth(OWN)}",
    ),
    Recording(
        "run:raypack_static:ratio10m",
        f"{_growth(STATIC)} / {_growth(OWN)}",
    ),
    # Of the last hour, or of all time where the run is younger.
    Recording(
        "run:raypack_goodput:ratio1h",
        "clamp_min(sum by (run) (delta(raypack_effective_seconds[1h]))"
        " / sum by (run) (clamp_max(time() - raypack_start_timestamp_seconds, 3600)), 0)",
    ),
    # 0 = even, 1 = every token takes the same experts.
    Recording(
        "run:raypack_router_collapse:ratio10m",
        f"(sum by (run) (avg_over_time(raypack_expert_load_ratio[{WINDOW}])) - 1)"
        " / (sum by (run) (raypack_expert_load_max_ratio) - 1)",
    ),
)

ALERTS = (
    Alert(
        "RaypackNoStep",
        "time() - raypack_step_timestamp_seconds",
        limits.NO_STEP_SECONDS,
        "1m",
        "critical",
        "run {{ $labels.run }}: no step for {{ $value | humanizeDuration }}",
        "Look at the workers' logs; a hung collective names itself after timeouts.collective.",
    ),
    Alert(
        "RaypackObserverDown",
        '1 - up{job="raypack"}',
        0,
        "2m",
        "warning",
        "{{ $labels.instance }} does not answer: the run was killed, or its observer is",
        "Training goes on without it. A file left in runs/.prometheus by a killed run can be removed.",
    ),
    Alert(
        "RaypackPlanLate",
        "run:raypack_plan_late:ratio10m",
        limits.PLAN_LATE,
        "10m",
        "warning",
        "run {{ $labels.run }}: {{ $value | humanizePercentage }} of the step time goes into waiting for plans",
        "Raise plan.look_ahead, lower plan.budget, or give the head node a core more.",
    ),
    Alert(
        "RaypackRankSlow",
        "rank:raypack_busy:ratio10m",
        limits.RANK_SLOW,
        "10m",
        "warning",
        "run {{ $labels.run }}: rank {{ $labels.rank }} on {{ $labels.node }} is busy {{ $value | humanize }} times as "
        "long as the mean",
        "Always ranks of one node: that machine is slow. Changing ranks: plans do not balance, look at the planner's "
        "dashboard.",
    ),
    Alert(
        "RaypackInterShareRising",
        "run:raypack_inter_bytes:ratio10m - run:raypack_inter_bytes:ratio10m offset 1h",
        limits.INTER_RISE,
        "15m",
        "warning",
        "run {{ $labels.run }}: {{ $value | humanizePercentage }} more exchange bytes cross nodes than an hour ago",
        "The lengths have changed, or the world has: look at block widths on the planner's dashboard.",
    ),
    Alert(
        "RaypackLossNotFinite",
        f"increase(raypack_steps_nonfinite_total[{WINDOW}])",
        0,
        "0m",
        "critical",
        "run {{ $labels.run }}: steps were skipped, loss or gradient was not finite",
        "All ranks skip such a step alike. If they go on: lower train.lr, look at the samples of these steps.",
    ),
    Alert(
        "RaypackCheckpointTooOld",
        "time() - raypack_checkpoint_timestamp_seconds",
        limits.CHECKPOINT_AGE_SECONDS,
        "5m",
        "warning",
        "run {{ $labels.run }}: the last checkpoint is {{ $value | humanizeDuration }} old",
        "Lower train.checkpoint_every; a failure now costs all steps since.",
    ),
    Alert(
        "RaypackRestartsOften",
        "increase(raypack_restarts_total[1h])",
        limits.RESTARTS,
        "0m",
        "warning",
        "run {{ $labels.run }}: {{ $value | humanize }} restarts in an hour",
        "Look at the nodes that come and go on the cluster's dashboard, and at Ray's.",
    ),
    Alert(
        "RaypackCheckpointFailing",
        "increase(raypack_checkpoint_failures_total[1h])",
        0,
        "0m",
        "critical",
        "run {{ $labels.run }}: a checkpoint could not be written",
        "attempts.jsonl of the run says why; look at the space and the speed of its checkpoint storage.",
    ),
    Alert(
        "RaypackPlanDrift",
        "run:raypack_measured:ratio10m / run:raypack_measured:ratio10m offset 1h",
        limits.DRIFT,
        "15m",
        "warning",
        "run {{ $labels.run }}: against the cost model steps take {{ $value | humanize }} times as long as an hour ago",
        "A machine or the network has become slow, or the lengths are such as the model misjudges: look at the ranks, "
        "then measure again with raypack calibrate.",
    ),
    Alert(
        "RaypackGoodputLow",
        "1 - run:raypack_goodput:ratio1h",
        1 - limits.GOODPUT,
        "30m",
        "warning",
        "run {{ $labels.run }}: {{ $value | humanizePercentage }} of the last hour went into no step that counts",
        "The cluster's dashboard says where it went: restarts and what they replay, checkpoints, held-out losses.",
    ),
    Alert(
        "RaypackRouterCollapsed",
        "run:raypack_router_collapse:ratio10m",
        limits.ROUTER_COLLAPSED,
        "10m",
        "warning",
        "run {{ $labels.run }}: the router is {{ $value | humanizePercentage }} of the way to the same experts for all",
        "Most experts learn nothing: raise train.balance_rate, or lower train.lr.",
    ),
)  # fmt: skip


def rule_file() -> dict[str, Any]:
    """Prometheus' own form of the rules."""
    recorded = [{"record": rule.name, "expr": rule.expr} for rule in RECORDINGS]
    alerts = [
        {
            "alert": rule.name,
            "expr": rule.expr,
            **({"for": rule.wait} if rule.wait != "0m" else {}),
            "labels": {"severity": rule.severity},
            "annotations": {"summary": rule.summary, "description": rule.what_to_do},
        }
        for rule in ALERTS
    ]
    return {"groups": [{"name": "raypack", "rules": recorded}, {"name": "raypack-alerts", "rules": alerts}]}
