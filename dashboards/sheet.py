"""Every panel's query result on one picture, without a Grafana: `python -m dashboards.sheet --out FILE.png`.

It asks a Prometheus what Grafana would ask, with the variables filled in, and draws lines and figures much as Grafana
does. A panel without data says so.
"""

from __future__ import annotations

import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dashboards.generate import BOARDS
from dashboards.panels import ANNOTATIONS, Annotation, Panel, Query
from raypack.commands.common import handle_errors
from raypack.errors import RaypackError

LINES_MAX = 12
COLUMNS = 4


@dataclass(frozen=True, eq=False)
class Line:
    """One series: its legend text, Unix times and values, float64 [points]."""

    name: str
    times: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Source:
    """A Prometheus, a time range (Unix seconds, one value every `step`), and what the variables stand for."""

    url: str
    start: float
    end: float
    step: float
    rate_window: str = "1m"
    run: str = ".*"
    rank: str = ".*"

    def lines(self, query: Query) -> list[Line]:
        """The query's series, those without any finite value left out.

        Raises:
            RaypackError: no Prometheus there, or one that refuses the expression.
        """
        found = []
        for result in self.ask(self.filled(query.expr)):
            times, values = np.array(result["values"], dtype=np.float64).T
            if np.isfinite(values).any():
                found.append(Line(named(query.legend, result["metric"]), times, values))
        return found

    def filled(self, expr: str) -> str:
        """The expression with Grafana's variables replaced."""
        timed = expr.replace("$window", self.rate_window).replace("$__range", f"{math.ceil(self.end - self.start)}s")
        return timed.replace("$run", self.run).replace("$rank", self.rank)

    def marks(self, annotation: Annotation) -> list[float]:
        """Unix times of the annotation inside the range."""
        values = [line.values[np.isfinite(line.values)] for line in self.lines(Query(annotation.expr, ""))]
        times = np.unique(np.concatenate([[], *values])) / 1e3
        return [float(time) for time in times if self.start <= time <= self.end]

    def ask(self, expr: str) -> list[dict]:
        """A range query's result, as Prometheus gives it."""
        asked = {"query": expr, "start": self.start, "end": self.end, "step": self.step}
        url = f"{self.url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                result: list[dict] = json.load(reply)["data"]["result"]
                return result
        except urllib.error.HTTPError as error:
            raise RaypackError(f"{expr}: {error.read().decode()[:300]}") from None
        except (OSError, ValueError) as error:
            raise RaypackError(f"no Prometheus answers at {self.url}: {error}; give another --prometheus") from None


def named(legend: str, labels: dict[str, str]) -> str:
    """`{{label}}` replaced by its value, as Grafana does."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), legend).strip()


def draw(source: Source, path: Path) -> list[str]:
    """Draw all dashboards; returns the titles of panels without data."""
    panels = [(board.title, row.title, panel) for board in BOARDS for row in board.rows for panel in row.panels]
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 2.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    empty = []
    marks = [(annotation.color, source.marks(annotation)) for annotation in ANNOTATIONS]
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axis, (board, row, panel) in zip(axes, panels, strict=False):
        lines = [line for query in panel.queries for line in source.lines(query)]
        axis.set_title(f"{board.removeprefix('raypack ')} / {row}: {panel.title}"[:70], fontsize=8, loc="left")
        axis.tick_params(labelsize=7)
        if not lines:
            empty.append(f"{board}: {panel.title}")
            axis.text(0.5, 0.5, "no data", ha="center", va="center", color="red", transform=axis.transAxes)
        elif panel.kind == "stat":
            _figures(axis, panel, lines)
        else:
            _plot(axis, panel, lines, source.start)
            for color, times in marks:
                for at in times:
                    axis.axvline(at - source.start, color=color, linestyle="--", linewidth=0.6, alpha=0.7)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=70)
    return empty


def _figures(axis: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    axis.set_axis_off()
    for i, line in enumerate(lines[:4]):
        known = line.values[np.isfinite(line.values)]
        value = float(known[-1])
        text = line.name.replace(", ", "\n") if panel.names else readable(value, panel.unit)
        limit = panel.limit
        color = "black" if limit is None else "red" if (value < limit if panel.low else value >= limit) else "green"
        size = 9 if panel.names else 16
        axis.text(0.5, 0.75 - 0.3 * i, text, ha="center", fontsize=size, color=color, transform=axis.transAxes)
        if not panel.names:
            axis.text(0.5, 0.65 - 0.3 * i, line.name, ha="center", fontsize=7, transform=axis.transAxes)


def _plot(axis: Axes, panel: Panel, lines: Sequence[Line], start: float) -> None:
    below: dict[float, float] = {}
    for line in lines[:LINES_MAX]:
        values = line.values
        if panel.stacked:
            base = np.array([below.get(t, 0.0) for t in line.times])
            values = base + np.nan_to_num(line.values)
            axis.fill_between(line.times - start, base, values, alpha=0.4, linewidth=0)
            below.update(zip(line.times.tolist(), values.tolist(), strict=True))
        axis.plot(line.times - start, values, linewidth=1, marker="." if len(values) < 4 else None, label=line.name)
    if panel.limit is not None:
        shown = axis.get_ylim()
        axis.axhline(panel.limit, color="red", linestyle="--", linewidth=0.8)
        axis.set_ylim(shown)  # a limit that is far off is not shown, as in Grafana
    more = f" (+{len(lines) - LINES_MAX})" if len(lines) > LINES_MAX else ""
    axis.set_ylabel(panel.unit + more, fontsize=7)
    axis.legend(fontsize=5.5, ncols=2, loc="best", framealpha=0.6)


UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "flops": "FLOP/s", "short": "", "none": "", "sci": ""}


def readable(value: float, unit: str) -> str:
    """A figure with its unit, short."""
    if unit == "percentunit":
        return f"{100 * value:.1f} %"
    if unit.startswith("suffix:"):
        return f"{value:.3g}{unit.removeprefix('suffix:')}"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and unit != "none":
            return f"{value / size:.3g} {prefix}{UNITS[unit]}"
    return f"{value:.4g} {UNITS[unit]}".strip()


def queries() -> Iterator[tuple[str, Panel, Query]]:
    """Every query of every board, with its panel and the board's title."""
    for board in BOARDS:
        for row in board.rows:
            for panel in row.panels:
                for query in panel.queries:
                    yield board.title, panel, query


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--prometheus", "url", default="http://127.0.0.1:9090", help="URL of the Prometheus to ask.")
@click.option("--run", default=".*", help="Runs to show, a regular expression.")
@click.option("--minutes", type=click.FloatRange(min=0.1), default=60.0, help="Time shown, up to now.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Picture, .png.")
@handle_errors
def main(url: str, run: str, minutes: float, out: Path) -> None:
    end = time.time()
    source = Source(url, end - 60 * minutes, end, max(1.0, 60 * minutes / 240), run=run)
    for title in draw(source, out):
        click.echo(f"no data: {title}")


if __name__ == "__main__":
    main()
