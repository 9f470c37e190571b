"""Plots of a run's records as SVG text, for the page of `raypack inspect --html`. Drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from raypack.observe.record import StepRecord
from raypack.report.series import columns
from raypack.report.sketches import HEIGHT, SKETCHES, WIDTH, margins


@dataclass(frozen=True)
class Plot:
    """One picture: its title, one line on how to read it, and SVG text without an XML head."""

    title: str
    about: str
    svg: str


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


def svg_text(figure: Figure, salt: str) -> str:
    """The figure as an `<svg>` element: text stays text, ids differ between pictures of one page."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
