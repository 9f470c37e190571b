"""What each plot of a run's page draws: functions of axes and columns, and the list of them in the page's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from raypack.observe.record import PHASES, SHARES, StepRecord, by_scope
from raypack.report.plots import (
    HEIGHT,
    WIDTH,
    Columns,
    Plot,
    across_steps,
    columns,
    legend_below,
    margins,
    scope_bytes,
    svg_text,
)

RANKS_DRAWN = 512
MEANS_SINCE = 2
"""Records of version 1 have each phase on a slowest rank of its own: no parts of one step."""


@dataclass(frozen=True)
class Sketch:
    """A plot of `panels` axes side by side; `draw` says whether the records had anything to draw."""

    title: str
    about: str
    draw: Callable[[Sequence[Axes], Columns, Sequence[StepRecord]], bool]
    panels: int = 1


def _loss(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    (axis,) = axes
    replaced = [(r.step, r.loss) for r in records if not r.effective and r.loss is not None]
    if replaced:
        axis.plot(*zip(*replaced, strict=True), ".", color="0.8", label="replayed later")
    axis.plot(kept.steps, kept.of(lambda r: r.loss if r.applied else None), label="training")
    held = [(r.step, r.heldout_loss) for r in kept.records if r.heldout_loss is not None]
    if held:
        axis.plot(*zip(*held, strict=True), "o-", markersize=4, label="held-out")
    skipped = [r.step for r in kept.records if not r.applied]
    for step in skipped[:50]:
        axis.axvline(step, color="red", linewidth=0.5)
    _mark_restarts(axis, kept)
    across_steps(axis, "loss")
    axis.legend(fontsize=8, frameon=False)
    return any(r.loss is not None for r in kept.records)


def _phases(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    (axis,) = axes
    found = kept.named(lambda r: r.phase_seconds if r.version >= MEANS_SINCE else {})
    _stack(axis, kept, {name: found[name] for name in PHASES if name in found})
    for marker, name in zip("sD", ("evaluate", "checkpoint"), strict=True):
        took = [(r.step, s) for r in kept.records if (s := getattr(r, f"{name}_seconds")) is not None]
        if took:
            axis.plot(*zip(*took, strict=True), marker, color="black", markersize=3, label=name)
    across_steps(axis, "seconds")
    legend_below(axis)
    return True


def _layers(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    (axis,) = axes
    found = kept.named(lambda r: _by_kind_and_way(r) if r.version >= MEANS_SINCE else {})
    if not found:
        return False
    _stack(axis, kept, found)
    across_steps(axis, "seconds")
    legend_below(axis)
    return True


def _by_kind_and_way(record: StepRecord) -> dict[str, float]:
    return {f"{kind} {way}": s for kind, ways in record.layer_seconds.items() for way, s in ways.items()}


def _speed(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    left, right = axes
    left.plot(kept.steps, kept.of(lambda r: r.tokens_per_second))
    across_steps(left, "tokens a second")
    left.set_ylim(bottom=0)
    mfu = kept.of(lambda r: r.mfu)
    if np.isfinite(mfu).any():
        right.plot(kept.steps, mfu)
        right.yaxis.set_major_formatter(PercentFormatter(1.0))
        right.set_ylim(bottom=0)
    else:
        right.text(0.5, 0.5, "peak unknown: no MFU", ha="center", transform=right.transAxes, fontsize=8)
    across_steps(right, "MFU")
    return True


def _modelled(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    left, right = axes
    planned = kept.of(lambda r: r.plan_step_seconds)
    if not np.isfinite(planned).any():
        return False
    left.plot(kept.steps, kept.of(lambda r: r.seconds), color="black", label="measured")
    left.plot(kept.steps, planned, label="this plan, modelled")
    across_steps(left, "seconds")
    left.set_ylim(bottom=0)
    left.legend(fontsize=8, frameon=False)
    for label, get in (("static", lambda r: r.static_step_seconds), ("dynamic", lambda r: r.dynamic_step_seconds)):
        right.plot(kept.steps, kept.of(get) / planned, label=label)
    right.axhline(1, color="black", linestyle=":", linewidth=1)
    across_steps(right, "seconds of other plans / this plan's")
    right.legend(fontsize=8, frameon=False)
    return True


def _bytes(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    for axis, scope, where in zip(axes, ("inter", "intra"), ("across nodes", "inside nodes"), strict=True):
        for policy, label in (("static", "static plans"), ("dynamic", "dynamic plans"), ("", "sent")):
            values = kept.of(partial(scope_bytes, scope=scope, policy=policy))
            if np.isfinite(values).any():
                axis.plot(kept.steps, values / 1e6, label=label, linewidth=2 if not policy else 1)
        across_steps(axis, f"MB a step {where}")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, frameon=False)
    return any(sum(by_scope(each).values()) for r in kept.records for each in (r.comparable_bytes, r.bytes_static))


def _sites(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    (axis,) = axes
    sources = {
        "sent": [r.comparable_bytes for r in kept.records],
        "static plans": [r.bytes_static for r in kept.records],
        "dynamic plans": [r.bytes_dynamic for r in kept.records],
    }
    sites = sorted(
        {site for each in sources.values() for counts in each for site in counts if any(counts[site].values())}
    )
    if not sites:
        return False
    rows = np.arange(len(sites), dtype=np.float64)
    for i, (label, each) in enumerate(sources.items()):
        base = np.zeros(len(sites))
        for scope, shade in (("intra", 0.4), ("inter", 1.0)):
            total = [sum(counts.get(site, {}).get(scope, 0) for counts in each) / 1e6 for site in sites]
            at = rows + 0.27 * (i - 1)
            axis.barh(at, total, 0.25, left=base, color=f"C{i}", alpha=shade, label=f"{label}, {scope}")
            base += total
    axis.set_yticks(rows, sites, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("MB, whole run", fontsize=8)
    legend_below(axis, left=0.3 + 0.07 * max(map(len, sites)))
    return True


def _widths(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    (axis,) = axes
    totals: dict[str, dict[int, int]] = {"parent": {}, "child": {}}
    for record in kept.records:
        for name, counts in (("parent", record.parent_widths), ("child", record.child_widths)):
            for width, count in counts.items():
                totals[name][width] = totals[name].get(width, 0) + count
    widths = sorted({width for counts in totals.values() for width in counts})
    if not widths:
        return False
    for i, (name, counts) in enumerate(totals.items()):
        at = np.arange(len(widths)) + 0.4 * i - 0.2
        bars = axis.bar(at, [counts.get(width, 0) for width in widths], 0.38, label=name)
        axis.bar_label(bars, fontsize=7)
    axis.set_xticks(range(len(widths)), [str(width) for width in widths])
    axis.set_xlabel("width (ranks)", fontsize=8)
    axis.set_ylabel("samples", fontsize=8)
    axis.margins(y=0.15)
    axis.legend(fontsize=8, frameon=False)
    return True


def _balance(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    (axis,) = axes
    drawn = False
    for label, get in (
        ("busy seconds", lambda r: r.imbalance("busy_seconds")),
        ("tokens", lambda r: r.imbalance("tokens")),
        ("experts", lambda r: r.expert_load),
    ):
        values = kept.of(get)
        if np.isfinite(values).any():
            axis.plot(kept.steps, values, label=label)
            drawn = True
    if drawn:
        axis.axhline(1, color="black", linestyle=":", linewidth=1)
        across_steps(axis, "largest / mean")
        axis.legend(fontsize=8, frameon=False)
    return drawn


def _ranks(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    (axis,) = axes
    busy = kept.ranks(lambda r: r.rank_busy_seconds)[:, :RANKS_DRAWN]
    if not np.isfinite(busy).any():
        return _rank_quantiles(axis, kept)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = busy / np.nanmean(np.where(np.isfinite(busy), busy, np.nan), axis=1, keepdims=True)
    steps = kept.steps
    shown = axis.imshow(
        relative.T,
        aspect="auto",
        cmap="RdBu_r",
        vmin=0.0,
        vmax=2.0,
        extent=(steps[0] - 0.5, steps[-1] + 0.5, busy.shape[1] - 0.5, -0.5),
        interpolation="nearest",
    )
    margins(axis.figure, right=0.4)
    axis.figure.colorbar(shown, ax=axis).set_label("busy / mean", fontsize=8)
    across_steps(axis, "rank")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    return True


def _rank_quantiles(axis: Axes, kept: Columns) -> bool:
    """Of worlds that are too large for a row each."""
    drawn = False
    for at, share in enumerate(SHARES):
        values = kept.of(partial(_busy_quantile, at=at))
        if np.isfinite(values).any():
            name = f"{share:.0%} of the ranks below" if 0 < share < 1 else ("least", "most")[at > 0]
            axis.plot(kept.steps, values, label=name)
            drawn = True
    if drawn:
        across_steps(axis, "busy / mean")
        axis.legend(fontsize=8, frameon=False)
    return drawn


def _busy_quantile(record: StepRecord, at: int) -> float | None:
    """Busy seconds at `SHARES[at]` of the ranks / their mean."""
    found = record.across_ranks("busy_seconds")
    return found.quantiles[at] / found.mean if found is not None and found.mean > 0 else None


def _planning(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    left, right = axes
    left.plot(kept.steps, kept.of(lambda r: r.plan_seconds), label="to make")
    left.plot(kept.steps, kept.of(lambda r: r.plan_wait_seconds), label="waited for")
    across_steps(left, "seconds a plan")
    left.set_ylim(bottom=0)
    left.legend(fontsize=8, frameon=False)
    right.plot(kept.steps, kept.of(lambda r: r.plan_bound_ratio))
    right.axhline(1, color="black", linestyle=":", linewidth=1)
    across_steps(right, "plan / area bound")
    return True


def _attempts(axes: Sequence[Axes], kept: Columns, records: Sequence[StepRecord]) -> bool:
    left, right = axes
    timed = sorted((r for r in records if r.time > 0), key=lambda r: r.time)
    if not timed:
        return False
    since = np.array([r.time - timed[0].time for r in timed])
    unit, size = next((u for u in (("hours", 3600.0), ("minutes", 60.0)) if since[-1] >= 2 * u[1]), ("seconds", 1.0))
    since /= size
    left.plot(since, [r.step for r in timed], ".-", markersize=3)
    left.set_ylabel("step", fontsize=8)
    right.step(since, [r.world for r in timed], where="post", label="ranks")
    right.step(since, [r.nodes for r in timed], where="post", label="nodes")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8, frameon=False)
    for axis in axes:
        for before, after, at in zip(timed, timed[1:], since[1:], strict=False):
            if after.attempt > before.attempt:
                axis.axvline(float(at), color="0.4", linestyle="--", linewidth=1)
        axis.set_xlabel(unit, fontsize=8)
    return True


def _stack(axis: Axes, kept: Columns, parts: dict[str, np.ndarray]) -> None:
    """Parts of the step on top of each other, under the step's own seconds.

    Only of parts that add up to it, never of maxima over ranks: the stack would stand above the step.
    """
    if parts:
        axis.stackplot(kept.steps, list(parts.values()), labels=list(parts), alpha=0.75, step="mid")
    seconds = kept.of(lambda r: r.seconds)
    axis.plot(kept.steps, seconds, color="black", linewidth=1, label="step, slowest rank", drawstyle="steps-mid")
    axis.set_ylim(bottom=0)


def _mark_restarts(axis: Axes, kept: Columns) -> None:
    for before, after in zip(kept.records, kept.records[1:], strict=False):
        if after.attempt != before.attempt:
            axis.axvline(after.step, color="0.4", linestyle="--", linewidth=1)


SKETCHES = (
    Sketch("Loss", "Dashed: restarts. Red: steps that all ranks skipped.", _loss),
    Sketch(
        "Step time by phase",
        "Means over the ranks; waiting is for slower ones, before gradients are summed. Marks: after the step.",
        _phases,
    ),
    Sketch("Speed", "Each token once. MFU: share of the peak that the summary names.", _speed, 2),
    Sketch(
        "Seconds against the model, static and dynamic plans",
        "Right: the same samples by the cost model; above 1 this plan is faster.",
        _modelled,
        2,
    ),
    Sketch("Exchange bytes against static and dynamic plans", "The same samples, other plans.", _bytes, 2),
    Sketch("Bytes by site", "Light: inside nodes. Full: across.", _sites),
    Sketch(
        "Block widths", "Ranks that share a sample's full attention (parent), and everything else (child).", _widths
    ),
    Sketch("Imbalance", "1 = even.", _balance),
    Sketch("Busy by rank", "A red row is a slow machine; red dots everywhere are plans that do not balance.", _ranks),
    Sketch("Layers by kind", "Exchanges included, means over the ranks.", _layers),
    Sketch("Planning", "1 = no plan can be faster.", _planning, 2),
    Sketch("Attempts", "Dashed: restarts. A step that falls back is replayed from a checkpoint.", _attempts, 2),
)


def plots(records: Sequence[StepRecord]) -> list[Plot]:
    """Every plot that resolved `records` have data for; older records lack some."""
    kept = columns(records)
    if not kept.records:
        return []
    made = []
    for sketch in SKETCHES:
        figure = Figure(figsize=(WIDTH * sketch.panels, HEIGHT))
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(1, sketch.panels, squeeze=False).flat)
        margins(figure)
        for axis in axes:
            axis.tick_params(labelsize=8)
        if sketch.draw(axes, kept, records):
            made.append(Plot(sketch.title, sketch.about, svg_text(figure, sketch.title)))
    return made
