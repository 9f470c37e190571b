"""What the dashboard shows: rows of panels, each with its queries. `generate` makes Grafana JSON of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RUN = 'run=~"$run"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the name of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """`unit` is Grafana's name of it; `span` of the 24 columns."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    span: int = 8
    stacked: bool = False
    decimals: int | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def value(metric: str, *extra: str) -> str:
    """The series of a metric, with further matchers."""
    return f"{metric}{{{', '.join((RUN, *extra))}}}"


def speed(metric: str, *extra: str, by: str = "run") -> str:
    """A counter's growth a second, summed by labels."""
    return f"sum by ({by}) (rate({value(metric, *extra)}{RATE}))"


def quantile(share: float) -> str:
    return f"histogram_quantile({share}, sum by (le, run) (rate({value('raypack_step_seconds_bucket')}{RATE})))"


def imbalance(metric: str) -> str:
    """Largest rank over the mean."""
    return f"max by (run) ({value(metric)}) / avg by (run) ({value(metric)})"


def _stat(title: str, description: str, expr: str, unit: str = "short", decimals: int | None = None) -> Panel:
    return Panel(title, description, (Query(expr, "{{run}}"),), unit, "stat", 4, decimals=decimals)


_SENT = "raypack_all_to_all_bytes_total"
_POLICY = "raypack_policy_bytes_total"
_INTER = 'scope="inter"'

ROWS: tuple[Row, ...] = (
    Row(
        "Now",
        (
            _stat("Step", "Last recorded step", value("raypack_step"), "none", 0),
            _stat("Loss", "Mean over the labels of the last applied step", value("raypack_loss"), "none", 4),
            _stat("Tokens a second", "Each token once", speed("raypack_tokens_total")),
            _stat("MFU", "Share of the peak; empty where unknown", value("raypack_mfu_ratio"), "percentunit"),
            _stat("Ranks", "Of the current attempt", value("raypack_world_size"), "none", 0),
            _stat("Restarts", "Starts after the first", value("raypack_restarts_total"), "none", 0),
        ),
    ),
    Row(
        "Learning",
        (
            Panel(
                "Loss",
                "Training, and held-out where it is taken",
                (
                    Query(value("raypack_loss"), "{{run}} training"),
                    Query(value("raypack_heldout_loss"), "{{run}} held-out"),
                ),
                "none",
            ),
            Panel(
                "Gradient norm",
                "Global, before clipping",
                (Query(value("raypack_grad_norm"), "{{run}}"),),
                "none",
            ),
            Panel("Learning rate", "", (Query(value("raypack_learning_rate"), "{{run}}"),), "none"),
        ),
    ),
    Row(
        "Speed",
        (
            Panel(
                "Step time",
                "Of the slowest rank",
                (
                    Query(quantile(0.5), "{{run}} median"),
                    Query(quantile(0.95), "{{run}} p95"),
                    Query(
                        f"{speed('raypack_step_seconds_sum')} / {speed('raypack_step_seconds_count')}", "{{run}} mean"
                    ),
                ),
                "s",
            ),
            Panel("MFU", "Of the last step", (Query(value("raypack_mfu_ratio"), "{{run}}"),), "percentunit"),
            Panel(
                "Phases",
                "Of the last step, each on its slowest rank",
                (Query(value("raypack_phase_seconds"), "{{run}} {{phase}}"),),
                "s",
                stacked=True,
            ),
        ),
    ),
    Row(
        "Traffic",
        (
            Panel(
                "Between nodes: this run, and what static and dynamic plans would send",
                "Exchange bytes across nodes, all ranks together",
                (
                    Query(speed(_SENT, _INTER), "{{run}} sent"),
                    Query(speed(_POLICY, _INTER, by="run, policy"), "{{run}} as {{policy}}"),
                ),
                "Bps",
            ),
            Panel(
                "Exchanges by site and scope",
                "Sent to other ranks: forward, backward and replays",
                (Query(speed(_SENT, by="site, scope"), "{{site}} {{scope}}"),),
                "Bps",
                stacked=True,
            ),
            Panel(
                "Other collectives",
                "Gradients, parameters, agreement; by the ring formula",
                (Query(speed("raypack_collective_bytes_total", by="op, scope"), "{{op}} {{scope}}"),),
                "Bps",
                stacked=True,
            ),
        ),
    ),
    Row(
        "Planning",
        (
            Panel(
                "Plan time",
                "The planner works ahead: its time matters where ranks wait",
                (
                    Query(value("raypack_plan_wait_seconds"), "{{run}} waited for"),
                    Query(value("raypack_plan_seconds"), "{{run}} to make"),
                ),
                "s",
                span=6,
            ),
            Panel(
                "Plan / bound",
                "Planned seconds over the area bound; 1 = no plan can be faster",
                (Query(value("raypack_plan_bound_ratio"), "{{run}}"),),
                "none",
                span=6,
            ),
            Panel(
                "Samples by parent width",
                "Ranks that share a sample's full attention",
                (Query(speed("raypack_block_samples_total", 'block="parent"', by="width"), "{{width}}"),),
                span=6,
                stacked=True,
            ),
            Panel(
                "Samples by child width",
                "Ranks that hold a sample everywhere else",
                (Query(speed("raypack_block_samples_total", 'block="child"', by="width"), "{{width}}"),),
                span=6,
                stacked=True,
            ),
        ),
    ),
    Row(
        "Ranks",
        (
            Panel(
                "Busy",
                "Own computation, last step",
                (Query(value("raypack_rank_busy_seconds"), "{{run}} {{rank}}"),),
                "s",
                span=6,
            ),
            Panel(
                "Waiting",
                "For other ranks, last step",
                (Query(value("raypack_rank_wait_seconds"), "{{run}} {{rank}}"),),
                "s",
                span=6,
            ),
            Panel(
                "Imbalance",
                "Largest over mean; 1 = even",
                (
                    Query(
                        imbalance("raypack_rank_busy_seconds"),
                        "{{run}} busy seconds",
                    ),
                    Query(
                        imbalance("raypack_rank_tokens"),
                        "{{run}} tokens",
                    ),
                    Query(value("raypack_expert_load_ratio"), "{{run}} experts"),
                ),
                "none",
                span=6,
            ),
            Panel(
                "Memory",
                "Peak of the fullest rank; empty where it is not measured",
                (Query(value("raypack_memory_bytes"), "{{run}}"),),
                "bytes",
                span=6,
            ),
        ),
    ),
    Row(
        "Elasticity",
        (
            Panel("World size", "Ranks", (Query(value("raypack_world_size"), "{{run}}"),), "none"),
            Panel(
                "Events",
                "Counted since the run's observer started",
                (
                    Query(value("raypack_restarts_total"), "{{run}} restarts"),
                    Query(value("raypack_steps_skipped_total"), "{{run}} skipped steps"),
                    Query(value("raypack_steps_incomplete_total"), "{{run}} incomplete steps"),
                ),
                "none",
            ),
            Panel(
                "Replayed samples",
                "Share of the samples that an earlier attempt had done already",
                (
                    Query(
                        f"{value('raypack_samples_replayed_total')} / {value('raypack_samples_total')}", "{{run}}"
                    ),
                ),
                "percentunit",
            ),
        ),
    ),
)  # fmt: skip
