"""The chart of a simulation: how far each policy is from the best one, in the mean and step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from raypack.files import PICTURES, check_target
from raypack.report.pictures import save
from raypack.simulate.replay import Replay, seconds_of

MARKERS = "os^Dv"
LINEAR_PERCENT = 1.0
TICKS = (-50, -20, -5, -1, 0, 1, 5, 20, 100, 500, 2000)
EVEN_PERCENT = 0.005
"""Closer plans count as equally good."""
DODGE = 0.12


def draw_policies(replayed: Replay, path: str | Path) -> None:
    """Write `policy_figure` to a file.

    Raises:
        RaypackError: a file that cannot be written.
    """
    check_target(path, "picture", PICTURES)
    save(policy_figure(replayed), path)


def policy_figure(replayed: Replay) -> Figure:
    """Left: each policy's mean against the best mean, seconds as text. Right: every step against its best plan.

    The axes are linear up to 1 % and logarithmic beyond, so that 2 % and 200 % are both seen.
    """
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = list(replayed.planned)
    seconds = np.array([seconds_of(replayed.planned[name]) for name in names])
    bound = np.array([each.figures.bound_seconds for each in replayed.planned[names[0]]])
    draw_means(left, names, seconds, float(bound.mean()))
    draw_steps(right, names, seconds, bound)
    figure.suptitle(
        f"{replayed.trace.name}, {replayed.trace.stream.tokens_per_step:,} tokens a step: {replayed.model.name} on "
        f"{replayed.cluster.name}, {replayed.topology.world} ranks, sync = {replayed.cluster.sync}",
        fontsize=10,
    )
    return figure


def draw_means(axis: Axes, names: list[str], seconds: np.ndarray, bound: float) -> None:
    """One row a policy. `seconds` [policies, steps]; `bound` = the mean area bound."""
    means, p95 = seconds.mean(axis=1), np.percentile(seconds, 95, axis=1, method="inverted_cdf")
    best = means.min()
    over = 100 * (means / best - 1)
    below = 100 * (bound / best - 1)
    axis.axvline(below, color="black", linestyle=":", linewidth=1)
    axis.text(below, -0.62, f" area bound {bound:.4g} s", fontsize=8, va="center")
    axis.axvline(0, color="0.8", linewidth=1, zorder=0)
    for row, percent in enumerate(over):
        colour, marker = f"C{row}", MARKERS[row % len(MARKERS)]
        axis.plot([0, percent], [row, row], color=colour, linewidth=3, solid_capstyle="butt")
        axis.plot(percent, row, marker, color=colour, markersize=8)
    for row, name in enumerate(names):
        told = f"{means[row]:.4g} s, " + ("the best" if over[row] < EVEN_PERCENT else f"+{over[row]:.3g} %")
        axis.text(0, row + 0.32, f" {told}; 95th percentile {p95[row]:.4g} s", fontsize=8, va="center")
        axis.text(0, row - 0.3, f" {name}", fontsize=8, va="center", weight="bold", color=f"C{row}")
    axis.set_yticks([])
    axis.set_ylim(len(names) - 0.3, -0.9)
    axis.set_xlabel("mean seconds of a step, % over the best policy", fontsize=9)
    _percent_axis(axis, "x", float(min(below, 0)), float(over.max()))


def draw_steps(axis: Axes, names: list[str], seconds: np.ndarray, bound: np.ndarray) -> None:
    """`seconds` [policies, steps]; `bound` [steps]. Points of one step stand beside each other, so that none hides."""
    best = seconds.min(axis=0)
    over = 100 * (seconds / best - 1)
    steps = np.arange(seconds.shape[1])
    below = 100 * (bound / best - 1)
    axis.plot(steps, below, "_", color="black", markersize=8, label="area bound")
    for row, name in enumerate(names):
        at = steps + DODGE * (row - (len(names) - 1) / 2)
        axis.plot(at, over[row], MARKERS[row % len(MARKERS)], color=f"C{row}", markersize=4, label=name)
    axis.axhline(0, color="0.8", linewidth=1, zorder=0)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel("seconds, % over the best plan of the step", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower right")
    _percent_axis(axis, "y", float(below.min()), float(over.max()))


def _percent_axis(axis: Axes, which: str, low: float, high: float) -> None:
    """Linear up to `LINEAR_PERCENT`, logarithmic beyond, from a bit below `low` to a bit above `high`."""
    low, high = min(1.3 * low, -LINEAR_PERCENT / 2), max(1.3 * high, LINEAR_PERCENT)
    if which == "x":
        axis.set_xscale("symlog", linthresh=LINEAR_PERCENT)
        axis.set_xlim(low, high)
    else:
        axis.set_yscale("symlog", linthresh=LINEAR_PERCENT)
        axis.set_ylim(low, high)
    ticks = axis.xaxis if which == "x" else axis.yaxis
    ticks.set_major_locator(FixedLocator([tick for tick in TICKS if low <= tick <= high]))
    ticks.set_minor_locator(NullLocator())
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "best"))
    axis.tick_params(labelsize=8)
