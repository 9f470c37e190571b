"""A run, or several beside each other, as one HTML page that needs nothing else: no script, no font, no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from raypack.errors import RaypackError
from raypack.files import write_file
from raypack.observe.record import StepRecord
from raypack.report.compare import Column, Comparison, common_lines, figure_columns, setting_columns
from raypack.report.console import COLUMNS, cells, summary_rows
from raypack.report.curves import curve_plots
from raypack.report.plots import Plot
from raypack.report.sketches import plots
from raypack.report.stored import StoredRun

PAGE_FILE = "page.html"
LAST_STEPS = 20


def write_page(run_dir: str | Path, target: str | Path | None = None) -> Path:
    """Write the page of a run, by default into its directory, and say where. Imports neither torch nor Ray.

    The run may go on, have ended, or have been killed, and need not have done a step.

    Raises:
        RaypackError: no run there, files that are none of a run's, or a page that cannot be written or drawn.
        OSError: files that cannot be read.
    """
    target = Path(target or Path(run_dir) / PAGE_FILE)
    try:
        write_file(target, page(StoredRun.read(run_dir)))
    except (OSError, RaypackError):
        raise
    except Exception as error:  # a drawing library's; whoever ends a run must not end by it
        raise RaypackError(f"cannot draw the page of {run_dir}: {error!r}") from error
    return target


def page(run: StoredRun, plan: Plot | None = None, plan_rows: str = "") -> str:
    """The whole page; `plan`, `plan_rows` = picture and text of one step's plan, where asked for."""
    columns, last_steps = _last_steps(run.records)
    return _rendered(
        "run.html",
        title=f"raypack run {run.name}".strip(),
        summary=summary_rows(run.summary),
        plots=plots(run.records),
        plan=plan,
        plan_rows=plan_rows,
        attempts=_attempts(run.records, run.summary.ends),
        columns=columns,
        last_steps=last_steps,
        config=run.config,
    )


def comparison_page(runs: Sequence[StoredRun], made: Comparison) -> str:
    """The whole page of two or more runs; `made` = `compare(runs)`."""
    named = zip(made.letters, made.names, runs, strict=True)
    return _rendered(
        "comparison.html",
        title=f"raypack: {len(runs)} runs compared",
        runs=[(letter, name, run.summary.stop_reason, run.summary.steps) for letter, name, run in named],
        curves=curve_plots([run.records for run in runs], made.letters),
        compared=_side_by_side([each.name for each in made.figures], figure_columns(made)),
        common=common_lines(made),
        differing=_side_by_side(list(made.differing), setting_columns(made)) if made.differing else None,
    )


def _rendered(template: str, **values: Any) -> str:
    """All of `values` is text but for what a template declares safe, the SVG of plots."""
    pages = Environment(
        loader=PackageLoader("raypack.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return pages.get_template(template).render(values)


def _attempts(records: Sequence[StepRecord], ends: Mapping[int, str]) -> list[tuple[object, ...]]:
    by_attempt: dict[int, list[StepRecord]] = {}
    for record in records:
        by_attempt.setdefault(record.attempt, []).append(record)
    return [
        (
            attempt,
            f"{each[0].step} to {each[-1].step}",
            sum(record.effective for record in each),
            each[-1].world,
            each[-1].nodes,
            f"{sum(record.seconds for record in each):,.1f}",
            ends.get(attempt, ""),
        )
        for attempt, each in sorted(by_attempt.items())
    ]


def _last_steps(records: Sequence[StepRecord]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; a column that would be empty is left out."""
    shown = [cells(record) for record in records if record.effective][-LAST_STEPS:]
    columns = [name for name in COLUMNS if any(row[name] for row in shown)]
    return columns, [[row[name] for name in columns] for row in shown]


def _side_by_side(labels: Sequence[str], runs: Iterable[Sequence[Column]]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Columns and rows of a table that has `labels` on its left."""
    columns = [column for mine in runs for column in mine]
    rows = zip(labels, *(cells for _, cells in columns), strict=True)
    return ["", *(name for name, _ in columns)], list(rows)
