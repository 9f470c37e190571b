"""`raypack inspect RUN...`: what a run did, or does, from its directory; several runs beside each other."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from raypack.commands.common import (
    PAGES,
    OutputFile,
    handle_errors,
    json_option,
    people_console,
    picture_option,
    write_json,
)
from raypack.errors import RaypackError
from raypack.files import write_file
from raypack.report.console import summary_table
from raypack.report.stored import StoredRun
from raypack.report.view import RunView

# matplotlib, the planner and corpora take a second to import; only pages, pictures and plans need them.
if TYPE_CHECKING:
    from raypack.plan.plan import Plan
    from raypack.report.plots import Plot


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--html", "page", type=OutputFile(*PAGES), default=None, help="Write a page with plots to this file.")
@picture_option("Draw to this {kinds}: --step's plan, else loss, seconds, tokens/s and bytes of the runs.")
@click.option("--step", type=click.IntRange(min=0), default=None, help="Show the plan of this step, from 0; one RUN.")
@click.option(
    "--follow", is_flag=True, help="Show steps as they come, until the run ends; Ctrl-C leaves it running. One RUN."
)
@click.option(
    "--compare",
    "other",
    type=click.Path(path_type=Path),
    default=None,
    metavar="RUN",
    help="The same as one more RUN.",
)
@json_option
@handle_errors
def inspect(
    runs: tuple[Path, ...],
    page: str | None,
    picture: str | None,
    step: int | None,
    follow: bool,
    other: Path | None,
    json_target: str | None,
) -> None:
    """Summarise RUN, the directory of a run (runs/NAME): loss, time, MFU, bytes, block widths.

    It reads what the run wrote, while it goes on, after it ended, or after it was killed. Several RUNs are set beside
    each other: their figures, the settings they differ in and, with --html or --picture, their curves.
    """
    folders = (*runs, other) if other is not None else runs
    if len(folders) > 1 and (step is not None or follow):
        raise RaypackError(f"--{'follow' if follow else 'step'}: goes with one RUN, not with {len(folders)}")
    console = people_console(json_target)
    if follow:
        _follow(folders[0], console)
    stored = [StoredRun.read(folder) for folder in folders]
    if len(stored) > 1:
        _compare(stored, page, console, json_target)
    elif step is None:
        _summarise(stored[0], page, console, json_target)
    else:
        _show_plan(stored[0], step, page, picture, console, json_target)
    if picture and step is None:
        _draw_curves(stored, picture)


def _follow(run: Path, console: Console) -> None:
    from raypack.observe.run_files import is_live, steps_of
    from raypack.observe.steps import follow

    if not is_live(run):
        console.print(f"{run} does not run any more", highlight=False)
        return
    try:
        with RunView(console, steps_of(run)) as view:
            for records in follow(run):
                view.show(records)
    except KeyboardInterrupt:
        console.print("the run goes on", highlight=False)


def _summarise(run: StoredRun, page: str | None, console: Console, json_target: str | None) -> None:
    console.print(summary_table(run.summary))
    if json_target is not None:
        write_json(json.loads(run.summary.to_json()), json_target)
    if page:
        from raypack.report.page import page as page_of

        write_file(page, page_of(run))


def _compare(runs: Sequence[StoredRun], page: str | None, console: Console, json_target: str | None) -> None:
    from raypack.report.compare import compare, comparison_text

    made = compare(runs)
    console.print(comparison_text(made, console.width), highlight=False)
    if json_target is not None:
        write_json(made.to_data(), json_target)
    if page:
        from raypack.report.page import comparison_page

        write_file(page, comparison_page(runs, made))


def _draw_curves(runs: Sequence[StoredRun], picture: str) -> None:
    from raypack.report.compare import letters_and_names
    from raypack.report.curves import curve_figure
    from raypack.report.pictures import save

    save(curve_figure([run.records for run in runs], *letters_and_names(runs)), picture)


def _show_plan(
    run: StoredRun, step: int, page: str | None, picture: str | None, console: Console, json_target: str | None
) -> None:
    from raypack.report.stored import costing, plan_of, plan_table, run_config

    plan, where = plan_of(run.folder, step, run.records)
    console.print(plan_table(plan, where))
    if json_target is not None:
        write_json(plan.to_data(), json_target)
    if picture:
        from raypack.report.pictures import draw_plans

        draw_plans([plan], *costing(run_config(run.folder)), picture)
    if page:
        from raypack.report.page import page as page_of

        write_file(page, page_of(run, *_drawn(run.folder, plan, where)))


def _drawn(run: Path, plan: Plan, where: str) -> tuple[Plot, str]:
    """The plan as a plot of the page, and its table as text."""
    from raypack.report.pictures import plan_figure
    from raypack.report.plots import Plot, svg_text
    from raypack.report.stored import costing, plan_table, run_config

    title = f"Plan of step {plan.step}"
    about = f"Ranks down, time across, as the cost model sees it; {where}."
    figure = plan_figure([plan], *costing(run_config(run)))
    text = io.StringIO()
    Console(file=text, width=120).print(plan_table(plan, where))
    return Plot(title, about, svg_text(figure, title)), text.getvalue()
