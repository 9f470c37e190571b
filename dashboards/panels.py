"""The words that dashboards are written in: boards of rows of panels, each with its queries, and common expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypack.observe.record import PLANNED_COLLECTIVES

RUN = 'run=~"$run"'
RANK = 'rank=~"$rank"'
RATE = "[$__rate_interval]"
INTER = 'scope="inter"'
EXCHANGED = "raypack_all_to_all_bytes_total"
COLLECTED = "raypack_collective_bytes_total"
PLANNED = "raypack_policy_bytes_total"


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


def series(title: str, description: str, *queries: tuple[str, str], unit: str = "none", **more: int | bool) -> Panel:
    """Lines over time: (expression, legend) each."""
    return Panel(title, description, tuple(Query(*query) for query in queries), unit, **more)  # type: ignore[arg-type]


def number(title: str, description: str, expr: str, unit: str = "none", decimals: int | None = None) -> Panel:
    """One large figure a run."""
    return Panel(title, description, (Query(expr, "{{run}}"),), unit, "stat", 4, decimals=decimals)
