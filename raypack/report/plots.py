"""What plots of runs are made of: records as columns, axes and legends, SVG text. Drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from raypack.observe.record import StepRecord, by_scope

POINTS_MAX = 600
WIDTH, HEIGHT = 5.6, 3.0
"""Inches of a panel."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Effective records of a run, in order; each of `points` stands for `group` of them (the last for fewer)."""

    records: Sequence[StepRecord]
    group: int

    @property
    def steps(self) -> np.ndarray:
        """float64 [points]."""
        return self.of(lambda record: record.step)

    def of(self, get: Callable[[StepRecord], float | None]) -> np.ndarray:
        """float64 [points]: the mean over each group; NaN where no record of it has a value."""
        return self.means([np.nan if (v := get(r)) is None else float(v) for r in self.records])

    def means(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """float64 [points]: as `of`, of one value for each record."""
        return _grouped(np.asarray(values, dtype=np.float64)[:, None], self.group)[:, 0]

    def ranks(self, get: Callable[[StepRecord], Sequence[float | None]]) -> np.ndarray:
        """float64 [points, ranks], NaN for ranks that are not there."""
        world = max((len(get(record)) for record in self.records), default=0)
        values = np.full((len(self.records), world), np.nan)
        for row, record in zip(values, self.records, strict=True):
            mine = get(record)
            row[: len(mine)] = [np.nan if v is None else v for v in mine]
        return _grouped(values, self.group)

    def named(self, get: Callable[[StepRecord], dict[str, float]]) -> dict[str, np.ndarray]:
        """`{name: float64 [points]}` for every name that occurs; 0 where a record lacks it, NaN where it has none."""
        each = [get(record) for record in self.records]
        names = dict.fromkeys(name for one in each for name in one)
        return {name: self.means([one.get(name, 0.0) if one else np.nan for one in each]) for name in names}


def columns(records: Sequence[StepRecord], points: int = POINTS_MAX) -> Columns:
    """Of resolved records (`steps.resolve`): those that count and have facts."""
    kept = [record for record in records if record.effective and record.sample_count > 0]
    return Columns(kept, max(1, -(-len(kept) // points)))


def scope_bytes(record: StepRecord, scope: str, policy: str = "") -> float | None:
    """Exchange bytes of a step in `scope`: sent, or of the `static` or `dynamic` plan; None where not recorded."""
    counts = {"": record.comparable_bytes, "static": record.bytes_static, "dynamic": record.bytes_dynamic}[policy]
    return by_scope(counts)[scope] if counts or not policy else None


def _grouped(values: np.ndarray, group: int) -> np.ndarray:
    """Means over `group` rows, NaN left out; [rows, columns] -> [ceil(rows / group), columns]."""
    if group == 1 or not len(values):
        return values
    starts = np.arange(0, len(values), group)
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.float64), starts, axis=0)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


@dataclass(frozen=True)
class Plot:
    """One picture: its title, one line on how to read it, and SVG text without an XML head."""

    title: str
    about: str
    svg: str


def across_steps(axis: Axes, label: str) -> None:
    """Steps from left to right, `label` upwards."""
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylabel(label, fontsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def margins(figure: Figure | SubFigure, left: float = 0.75, right: float = 0.15, bottom: float = 0.48) -> None:
    """Inches around each panel, for its numbers and names.

    Fixed, since a layout that measures every text doubles the time of a page, and a run waits for it at its end.
    """
    wide = figure.bbox.width / figure.dpi
    panels = wide / WIDTH
    inner = (wide - panels * left - panels * right) / panels
    figure.subplots_adjust(
        left=left / wide,
        right=1 - right / wide,
        bottom=bottom / HEIGHT,
        top=1 - 0.2 / HEIGHT,
        wspace=(left + right) / inner,
    )


def legend_below(axis: Axes, left: float = 0.75) -> None:
    """Areas fill the axes, so that no corner is left for names; `left` = margin, inches."""
    handles, names = axis.get_legend_handles_labels()
    margins(axis.figure, left, bottom=0.55 + 0.17 * -(-len(names) // 4))
    axis.figure.legend(handles, names, fontsize=7, frameon=False, ncols=4, loc="lower center")


def svg_text(figure: Figure, salt: str) -> str:
    """The figure as an `<svg>` element: text stays text, ids differ between pictures of one page."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
