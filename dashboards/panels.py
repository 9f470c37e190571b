"""The words that dashboards are written in: boards of rows of panels, each with its queries, and common expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypack.observe.record import PLANNED_COLLECTIVES

RUN = 'run=~"$run"'
RANK = 'rank=~"$rank"'
# Chosen at the top of the page: it must be long against a step, which Grafana's own rate interval knows nothing of.
RATE = "[$window]"
# Lines of single ranks in a panel, whatever the world.
RANKS_SHOWN = 5
INTER = 'scope="inter"'
EXCHANGED = "raypack_all_to_all_bytes_total"
COLLECTED = "raypack_collective_bytes_total"
PLANNED = "raypack_policy_bytes_total"
MODELLED = "raypack_modelled_seconds_total"


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the name of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """`unit` is Grafana's name of it; `span` of the 24 columns. Beyond `limit` (`low`: below it) a value is red;
    `names` shows the names of the series in place of their values."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    span: int = 8
    stacked: bool = False
    decimals: int | None = None
    limit: float | None = None
    low: bool = False
    names: bool = False


@dataclass(frozen=True)
class Annotation:
    """Marks in every panel of every board: the values of `expr` are Unix times in milliseconds."""

    name: str
    color: str
    expr: str
    text: str


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard; `uid` is also its file's name. `ranks`: its panels use the variable `rank`."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    ranks: bool = False


def value(metric: str, *extra: str) -> str:
    """The series of a metric, with further matchers."""
    return f"{metric}{{{', '.join((RUN, *extra))}}}"


def speed(metric: str, *extra: str, by: str = "run") -> str:
    """A counter's growth a second, summed by labels."""
    return f"sum by ({by}) (rate({value(metric, *extra)}{RATE}))"


def sent(*extra: str) -> str:
    """Bytes a second that depend on the plan: exchanges, and the collectives that plans are costed with."""
    planned = f'op=~"{"|".join(PLANNED_COLLECTIVES)}"'
    return f"({speed(EXCHANGED, *extra)} + {speed(COLLECTED, planned, *extra)})"


def a_step(metric: str, *extra: str) -> str:
    """A counter's growth a step."""
    return f"{speed(metric, *extra)} / {speed('raypack_step_seconds_count')}"


def quantile(share: float) -> str:
    return f"histogram_quantile({share}, sum by (le, run) (rate({value('raypack_step_seconds_bucket')}{RATE})))"


def imbalance(metric: str) -> str:
    """Largest rank over the mean."""
    return f"max by (run) ({value(metric)}) / avg by (run) ({value(metric)})"


def age(metric: str) -> str:
    """Seconds since a Unix time."""
    return f"time() - {value(metric)}"


def a_step_modelled(plan: str) -> str:
    """Seconds a step by the cost model: of the run's `own` plans, or of `static` or `dynamic` ones."""
    return a_step(MODELLED, f'plan="{plan}"')


def against_own(plan: str) -> str:
    """Modelled seconds of `static` or `dynamic` plans over those of the run's own."""
    modelled = (speed(MODELLED, f'plan="{each}"') for each in (plan, "own"))
    return " / ".join(modelled)


def by_rank(metric: str) -> tuple[tuple[str, str], ...]:
    """The ranks that have most of it over the time shown, and where the others lie."""
    each = value(metric, RANK)
    most = f"{each} and topk by (run) ({RANKS_SHOWN}, avg_over_time({each}[$__range] @ end()))"
    return (
        (most, "{{run}} rank {{rank}} on {{node}}"),
        (f"quantile by (run) (0.5, {each})", "{{run}} median"),
        (f"min by (run) ({each})", "{{run}} least"),
    )


def series(title: str, description: str, *queries: tuple[str, str], unit: str = "none", **more: float | bool) -> Panel:
    """Lines over time: (expression, legend) each."""
    return Panel(title, description, tuple(Query(*query) for query in queries), unit, **more)  # type: ignore[arg-type]


def number(
    title: str, description: str, expr: str, unit: str = "none", decimals: int | None = None, **more: float | bool
) -> Panel:
    """One large figure a run."""
    return Panel(title, description, (Query(expr, "{{run}}"),), unit, "stat", 4, decimals=decimals, **more)  # type: ignore[arg-type]


ANNOTATIONS = (
    Annotation(
        "Attempts", "orange", f"{value('raypack_attempt_timestamp_seconds')} * 1000", "{{run}}: an attempt starts"
    ),
    Annotation(
        "Checkpoints",
        "blue",
        # Before there is one the time says since when it is waited for, such as the attempt's start.
        f"(({value('raypack_checkpoint_timestamp_seconds')} and {value('raypack_checkpoints_total')} > 0)"
        f" != {value('raypack_attempt_timestamp_seconds')}) * 1000",
        "{{run}}: checkpoint",
    ),
)
