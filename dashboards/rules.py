"""Recording and alert rules. An alert is a value and a limit, so that a test can also ask for the value itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dashboards.panels import INTER
from raypack.observe.record import PLANNED_COLLECTIVES

# Windows are long against a step: at scale one takes tens of seconds.
WINDOW = "10m"


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
    limit: str
    wait: str
    severity: str
    summary: str
    what_to_do: str

    @property
    def expr(self) -> str:
        return f"({self.value}) > {self.limit}"


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
        f"avg by (run, rank) (avg_over_time(raypack_rank_busy_seconds[{WINDOW}]))"
        f" / on (run) group_left () avg by (run) (avg_over_time(raypack_rank_busy_seconds[{WINDOW}]))",
    ),
)

ALERTS = (
    Alert(
        "RaypackNoStep",
        "time() - raypack_step_timestamp_seconds",
        "900",
        "1m",
        "critical",
        "run {{ $labels.run }}: no step for {{ $value | humanizeDuration }}",
        "Look at the workers' logs; a hung collective names itself after timeouts.collective.",
    ),
    Alert(
        "RaypackObserverDown",
        '1 - up{job="raypack"}',
        "0",
        "2m",
        "warning",
        "{{ $labels.instance }} does not answer: the run was killed, or its observer is",
        "Training goes on without it. A file left in runs/.prometheus by a killed run can be removed.",
    ),
    Alert(
        "RaypackPlanLate",
        "run:raypack_plan_late:ratio10m",
        "0.05",
        "10m",
        "warning",
        "run {{ $labels.run }}: {{ $value | humanizePercentage }} of the step time goes into waiting for plans",
        "Raise plan.look_ahead, lower plan.budget, or give the head node a core more.",
    ),
    Alert(
        "RaypackRankSlow",
        "rank:raypack_busy:ratio10m",
        "1.5",
        "10m",
        "warning",
        "run {{ $labels.run }}: rank {{ $labels.rank }} is busy {{ $value | humanize }} times as long as the mean",
        "One rank always: its machine is slow. Changing ranks: plans do not balance, look at the planner's dashboard.",
    ),
    Alert(
        "RaypackInterShareRising",
        "run:raypack_inter_bytes:ratio10m - run:raypack_inter_bytes:ratio10m offset 1h",
        "0.1",
        "15m",
        "warning",
        "run {{ $labels.run }}: {{ $value | humanizePercentage }} more exchange bytes cross nodes than an hour ago",
        "The lengths have changed, or the world has: look at block widths on the planner's dashboard.",
    ),
    Alert(
        "RaypackLossNotFinite",
        f"increase(raypack_steps_nonfinite_total[{WINDOW}])",
        "0",
        "0m",
        "critical",
        "run {{ $labels.run }}: steps were skipped, loss or gradient was not finite",
        "All ranks skip such a step alike. If they go on: lower train.lr, look at the samples of these steps.",
    ),
    Alert(
        "RaypackCheckpointTooOld",
        "time() - raypack_checkpoint_timestamp_seconds",
        "7200",
        "5m",
        "warning",
        "run {{ $labels.run }}: the last checkpoint is {{ $value | humanizeDuration }} old",
        "Lower train.checkpoint_every; a failure now costs all steps since.",
    ),
    Alert(
        "RaypackRestartsOften",
        "increase(raypack_restarts_total[1h])",
        "3",
        "0m",
        "warning",
        "run {{ $labels.run }}: {{ $value | humanize }} restarts in an hour",
        "Look at the nodes that come and go on the cluster's dashboard, and at Ray's.",
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
