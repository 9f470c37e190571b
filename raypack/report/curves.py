"""Curves of runs over each other: loss over steps and over tokens, seconds, tokens a second, bytes between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from raypack.observe.record import StepRecord
from raypack.report.plots import Columns, Plot, columns, scope_bytes, svg_text

DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
HUES = 10
NAME_LETTERS = 60


@dataclass(frozen=True)
class Curve:
    """What is drawn of every run. `value` is asked for a record, and for the first run's record of that step if any."""

    title: str
    label: str
    value: Callable[[StepRecord, StepRecord | None], float | None]
    over_tokens: bool = False
    from_zero: bool = True
    held_out: bool = False


def loss_of(record: StepRecord, first: StepRecord | None) -> float | None:
    return record.loss if record.applied else None


def loss_gap(record: StepRecord, first: StepRecord | None) -> float | None:
    return None if first is None or record.loss is None or first.loss is None else record.loss - first.loss


CURVES = (
    Curve("Loss over steps", "loss", loss_of, from_zero=False, held_out=True),
    Curve("Loss over tokens", "loss", loss_of, over_tokens=True, from_zero=False, held_out=True),
    Curve("Loss against A's", "loss - A's loss, same step", loss_gap, from_zero=False),
    Curve("Seconds a step", "seconds", lambda r, _: r.seconds),
    Curve("Tokens a second", "tokens / s", lambda r, _: r.tokens_per_second),
    Curve("Bytes between nodes", "MB a step", lambda r, _: (scope_bytes(r, "inter") or 0.0) / 1e6),
)


def curve_plots(runs: Sequence[Sequence[StepRecord]], letters: Sequence[str]) -> list[Plot]:
    """One plot for each of `CURVES` that any run has data for, with letters as legend.

    Args:
        runs: resolved records of each run.
    """
    kept = [columns(records) for records in runs]
    made = []
    for curve in _curves(runs):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        if _draw(axis, curve, kept):
            axis.legend(_lines(len(runs)), letters, fontsize=8, frameon=False, ncols=-(-len(runs) // 8))
            about = "Dots: held-out loss." if curve.held_out else ""
            made.append(Plot(curve.title, about, svg_text(figure, curve.title)))
    return made


def curve_figure(runs: Sequence[Sequence[StepRecord]], letters: Sequence[str], names: Sequence[str]) -> Figure:
    """All curves in one figure, below them the names."""
    kept = [columns(records) for records in runs]
    named = ["\n".join(wrap(f"{mark}  {name}", NAME_LETTERS)) for mark, name in zip(letters, names, strict=True)]
    lines = sum(each.count("\n") + 1 for each in named)
    figure = Figure(figsize=(14.0, 7.5 + 0.16 * -(-lines // 3)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(2, 3).flat)
    for unused in axes[len(_curves(runs)) :]:
        unused.set_axis_off()
    for axis, curve in zip(axes, _curves(runs), strict=False):
        axis.set_title(curve.title, fontsize=9, loc="left")
        if not _draw(axis, curve, kept):
            axis.text(0.5, 0.5, "not on record", ha="center", transform=axis.transAxes, fontsize=8)
    figure.legend(_lines(len(runs)), named, fontsize=8, frameon=False, loc="outside lower left", ncols=3)
    return figure


def _curves(runs: Sequence[object]) -> list[Curve]:
    """A single run has no other to lie against."""
    return [curve for curve in CURVES if len(runs) > 1 or curve.value is not loss_gap]


def _draw(axis: Axes, curve: Curve, runs: Sequence[Columns]) -> bool:
    """Whether there was anything to draw."""
    first = {record.step: record for record in runs[0].records}
    drawn = False
    for line, kept in zip(_lines(len(runs)), runs, strict=True):
        values = kept.of(lambda r: curve.value(r, first.get(r.step)))
        if not np.isfinite(values).any():
            continue
        drawn = True
        tokens = np.cumsum([r.tokens for r in kept.records]) / 1e6
        at = kept.means(tokens) if curve.over_tokens else kept.steps
        axis.plot(at, values, linewidth=1.2, color=line.get_color(), linestyle=line.get_linestyle())
        if curve.held_out:
            where = tokens if curve.over_tokens else [r.step for r in kept.records]
            held = [(x, r.heldout_loss) for x, r in zip(where, kept.records, strict=True) if r.heldout_loss is not None]
            axis.plot(*np.array(held).reshape(-1, 2).T, "o", color=line.get_color(), markersize=4)
    axis.set_xlabel("million tokens" if curve.over_tokens else "step", fontsize=8)
    axis.set_ylabel(curve.label, fontsize=8)
    axis.tick_params(labelsize=8)
    if curve.from_zero:
        axis.set_ylim(bottom=0)
    if not curve.over_tokens:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawn


def _lines(count: int) -> list[Line2D]:
    """A colour for each run, and another dash where the colours begin again."""
    return [Line2D([], [], color=f"C{i % HUES}", linestyle=DASHES[i // HUES % len(DASHES)]) for i in range(count)]
