"""Pictures of plans over time, PNG, SVG or PDF. Drawn without a display."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from raypack.config import ClusterConfig, ModelConfig
from raypack.errors import RaypackError
from raypack.files import PICTURES, check_target, write_file
from raypack.plan.plan import Plan
from raypack.planning.evaluate import Evaluation, evaluate
from raypack.report.timeline import EXCHANGE, FULL, Timeline, timeline

RANKS_MAX = 1024
LABELS_MAX = 60
WIDTH = 13.0
LETTER_INCHES, LINE_INCHES = 0.058, 0.12
VECTORS_MAX = 20_000
"""An SVG of more rectangles opens in no viewer; they become an image in it."""
EXCHANGE_COLOUR = (0.25, 0.25, 0.25)
WAITING_COLOUR = (0.93, 0.93, 0.93)


def check_ranks(world: int) -> None:
    """Raises RaypackError for more ranks than a picture of a plan can show."""
    if world > RANKS_MAX:
        raise RaypackError(f"picture: {world} ranks, over the {RANKS_MAX} that one can show; ask for fewer --ranks")


def draw_plans(
    plans: Sequence[Plan], cluster: ClusterConfig, model: ModelConfig, path: str | Path, sync: str | None = None
) -> None:
    """Write `plan_figure` to a file.

    Raises:
        RaypackError: as `plan_figure`; a file that cannot be written.
    """
    check_target(path, "picture", PICTURES)
    save(plan_figure(plans, cluster, model, sync), path)


def plan_figure(plans: Sequence[Plan], cluster: ClusterConfig, model: ModelConfig, sync: str | None = None) -> Figure:
    """Draw plans below each other on one time axis: ranks down, time across, one colour a sample.

    Dark = full attention, light = everything else of the same sample, black = exchanges of full layers, grey =
    waiting; lines between nodes, ticks where a rank leaves a round. Long samples carry `id: length, parent > child`.

    Raises:
        RaypackError: as `evaluate`; more ranks than a picture can show.
    """
    for plan in plans:
        check_ranks(plan.topology.world)
    lines = [timeline(plan, cluster, model, sync) for plan in plans]
    heights = [float(np.clip(0.085 * plan.topology.world, 2.2, 16)) for plan in plans]
    figure, axes = _figure(len(plans), WIDTH, sum(heights) + 0.7 * len(plans) + 0.8, heights)
    longest = max(line.seconds for line in lines)
    colours = _sample_colours(plans)
    for axis, plan, line, inches in zip(axes, plans, lines, heights, strict=True):
        axis.set_xlim(0, longest)
        _draw_timeline(axis, line, colours)
        _label_samples(axis, plan, line, inches)
        axis.set_title(_title(plan, evaluate(plan, cluster, model, sync), cluster), fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _figure(rows: int, width: float, height: float, heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    # A figure of its own canvas: nothing of pyplot's process-wide state, no display.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, squeeze=False, gridspec_kw={"height_ratios": list(heights)})
    return figure, list(axes.flat)


def _draw_timeline(axis: Axes, line: Timeline, colours: dict[int, float]) -> None:
    topology = line.topology
    left, right = line.start, line.start + line.duration
    top, bottom = line.rank.astype(np.float64), line.rank + 1.0
    edges = ((left, top), (right, top), (right, bottom), (left, bottom))
    corners = np.stack([np.stack(edge, axis=1) for edge in edges], axis=1)
    parts = zip(line.kind.tolist(), line.sample.tolist(), strict=True)
    faces = [_colour(kind, colours.get(sample)) for kind, sample in parts]
    axis.axvspan(0, line.seconds, color=WAITING_COLOUR, linewidth=0, zorder=0)
    axis.axvline(line.seconds, color="black", linewidth=0.8)
    rectangles = PolyCollection(list(corners), facecolors=faces, linewidths=0, antialiased=False)
    rectangles.set_rasterized(len(faces) > VECTORS_MAX)
    axis.add_collection(rectangles)
    for ends in line.round_ends[:-1]:
        axis.vlines(ends, np.arange(topology.world), np.arange(topology.world) + 1, color="black", linewidth=1)
    for first in topology.node_firsts[1:]:
        axis.axhline(first, color="black", linewidth=0.8)
    axis.set_ylim(topology.world, 0)
    axis.set_yticks([first + size / 2 for first, size in zip(topology.node_firsts, topology.nodes, strict=True)])
    axis.set_yticklabels([f"node {i}" for i in range(len(topology.nodes))] if len(topology.nodes) <= 40 else [])
    axis.tick_params(labelsize=8)
    axis.tick_params(axis="y", length=0)


def _sample_colours(plans: Sequence[Plan]) -> dict[int, float]:
    """A hue for each sample, the same in every plan; neighbours in length differ most (golden angle)."""
    lengths = {p.sample: p.length for plan in plans for p in plan.placements}
    ordered = sorted(lengths, key=lambda sample: (-lengths[sample], sample))
    return {sample: (0.02 + 0.61803398875 * i) % 1.0 for i, sample in enumerate(ordered)}


def _colour(kind: int, hue: float | None) -> tuple[float, float, float]:
    if kind == EXCHANGE or hue is None:
        return EXCHANGE_COLOUR
    return colorsys.hsv_to_rgb(hue, 0.8, 0.72) if kind == FULL else colorsys.hsv_to_rgb(hue, 0.3, 0.97)


def _label_samples(axis: Axes, plan: Plan, line: Timeline, inches: float) -> None:
    """Name the samples whose full part is large enough, largest first; upright where only that fits.

    Args:
        inches: height of the axis.
    """
    longest = sorted(plan.placements, key=lambda p: (-p.length, p.sample))[:LABELS_MAX]
    topology, (_, seconds) = plan.topology, axis.get_xlim()
    for p in longest:
        mine = (line.sample == p.sample) & (line.kind == FULL)
        if not mine.any():
            continue
        left, right = float(line.start[mine].min()), float((line.start + line.duration)[mine].max())
        # In the middle of a node, where no border crosses the text.
        middle = p.parent.first + p.parent.width // 2
        node = p.parent if topology.in_one_node(p.parent) else topology.node_block(topology.node_of[middle])
        text = f"{p.sample}: {_tokens(p.length)}, {p.parent.width} > {p.child.width}"
        across, down = (right - left) / seconds * WIDTH, node.width / topology.world * inches
        long, high = LETTER_INCHES * len(text), LINE_INCHES
        if across >= long and down >= high:
            rotation = 0
        elif across >= high and down >= long:
            rotation = 90
        else:
            continue
        where = (left + right) / 2, node.first + node.width / 2
        axis.text(*where, text, ha="center", va="center", fontsize=7, color="white", clip_on=True, rotation=rotation)


def _tokens(count: int) -> str:
    return f"{count / 1024:.1f}K" if count >= 1024 else str(count)


def _title(plan: Plan, figures: Evaluation, cluster: ClusterConfig) -> str:
    waiting = float(figures.rank_waiting.mean()) / figures.seconds
    return (
        f"{plan.policy} on {cluster.name}, {figures.ranks} ranks, sync = {figures.sync}: {figures.seconds:.4g} s, "
        f"{figures.bound_ratio:.3f} x area bound, waiting {100 * waiting:.1f} %, "
        f"{sum(len(r.placements) for r in plan.rounds)} samples, {figures.rounds} round{'s' * (figures.rounds > 1)}"
    )


def _legend() -> list[Patch]:
    return [
        Patch(facecolor=_colour(FULL, 0.6), label="full attention (label: sample: tokens, parent > child)"),
        Patch(facecolor=_colour(2, 0.6), label="everything else of the same sample (cheap)"),
        Patch(facecolor=EXCHANGE_COLOUR, label="exchanges of full layers, round costs"),
        Patch(facecolor=WAITING_COLOUR, edgecolor="grey", label="waiting"),
    ]


def save(figure: Figure, path: str | Path) -> None:
    """Write the whole picture or nothing; the same bytes each time.

    Raises:
        RaypackError: the file cannot be written.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    # Dates would differ each time; PNG has none.
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    made = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "raypack"}):
        figure.savefig(made, format=kind, dpi=130, metadata=dates.get(kind))
    write_file(path, made.getvalue())
