"""Runs beside each other as one HTML page: their names, curves over each other, figures, settings that differ."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from raypack.report.compare import Comparison
from raypack.report.compare_table import Column, common_lines, figure_columns, setting_columns
from raypack.report.curves import curve_plots
from raypack.report.page import document, figures, table
from raypack.report.stored_run import StoredRun


def comparison_page(runs: Sequence[StoredRun], made: Comparison) -> str:
    """The whole page of two or more runs; `made` = `compare(runs)`."""
    parts = [
        table(["", "run", "ended", "steps"], _rows(runs, made), texts=3),
        "<h2>Curves</h2>",
        figures(curve_plots([run.records for run in runs], made.letters)),
        "<h2>Figures</h2>",
        _side_by_side([each.name for each in made.figures], figure_columns(made)),
        *(f"<p>{html.escape(line)}</p>" for line in common_lines(made)),
    ]
    if made.differing:
        parts += ["<h2>Settings that differ</h2>", _side_by_side(list(made.differing), setting_columns(made))]
    return document(f"raypack: {len(runs)} runs compared", parts)


def _rows(runs: Sequence[StoredRun], made: Comparison) -> list[list[str]]:
    return [
        [letter, name, run.summary.stop_reason, str(run.summary.steps)]
        for letter, name, run in zip(made.letters, made.names, runs, strict=True)
    ]


def _side_by_side(labels: Sequence[str], runs: Iterable[Sequence[Column]]) -> str:
    columns = [column for mine in runs for column in mine]
    rows = zip(labels, *(cells for _, cells in columns), strict=True)
    return table(["", *(name for name, _ in columns)], rows, texts=1)
