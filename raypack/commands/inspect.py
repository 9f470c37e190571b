"""`raypack inspect RUN`: what a run did, or does, from its directory."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from raypack.commands.common import handle_errors, json_option, people_console, write_json, write_text
from raypack.errors import RaypackError
from raypack.observe.attempts import ends_of
from raypack.observe.console import RunView, summary_table
from raypack.observe.record import StepRecord
from raypack.observe.steps import read_steps
from raypack.observe.summary import Summary, read_summary, summarise

if TYPE_CHECKING:
    from raypack.observe.plots import Plot
    from raypack.planning.plan import Plan


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--html", "page", type=click.Path(dir_okay=False), default=None, help="Write a page with plots to this file."
)
@click.option(
    "--compare",
    "other",
    type=click.Path(path_type=Path),
    default=None,
    metavar="RUN",
    help="Set another run beside it.",
)
@click.option("--step", type=click.IntRange(min=0), default=None, help="Show the plan of this step, from 0.")
@click.option(
    "--picture", type=click.Path(dir_okay=False), default=None, help="Draw --step's plan to this .png or .svg."
)
@click.option("--follow", is_flag=True, help="Show steps as they come, until the run ends; Ctrl-C leaves it running.")
@json_option
@handle_errors
def inspect(
    run: Path,
    page: str | None,
    other: Path | None,
    step: int | None,
    picture: str | None,
    follow: bool,
    json_target: str | None,
) -> None:
    """Summarise RUN, the directory of a run (runs/NAME): loss, time, MFU, bytes, block widths.

    It reads what the run wrote, while it goes on, after it ended, or after it was killed.
    """
    _check(page, other, step, picture, follow)
    console = people_console(json_target)
    if follow:
        _follow(run, console)
    records, summary = load(run)
    if other is not None:
        _compare((run, other), (summary, load(other)[1]), (records, load(other)[0]), console, json_target)
    elif step is not None:
        plan, where = _plan(run, step, records)
        _show_plan(run, plan, where, picture, console, json_target)
        if page:
            _write_page(page, run, records, summary, plan, where)
    else:
        if json_target is not None:
            write_json(json.loads(summary.to_json()), json_target)
        console.print(summary_table(summary))
        if page:
            _write_page(page, run, records, summary)


def load(run_dir: Path) -> tuple[list[StepRecord], Summary]:
    """Resolved records, and figures of them; the stop reason and notes from `summary.json`, where the run left one.

    Raises:
        RaypackError: no run there, or files that are none.
    """
    left = read_summary(run_dir)
    name = left.run if left else run_dir.resolve().name
    records = read_steps(run_dir)
    reason, notes = (left.stop_reason, left.notes) if left else ("", [])
    return records, summarise(records, name, reason, notes, ends_of(run_dir))


def _check(page: str | None, other: Path | None, step: int | None, picture: str | None, follow: bool) -> None:
    """Raises RaypackError for options that do not go together."""
    if page and not Path(page).parent.is_dir():
        raise RaypackError(f"--html {page}: there is no folder {Path(page).parent}; make it or choose another")
    if picture and step is None:
        raise RaypackError("--picture: needs --step N, the step whose plan is drawn")
    if other is not None and (page or step is not None or follow):
        raise RaypackError("--compare: goes with --json only; leave out --html, --step and --follow")


def _follow(run: Path, console: Console) -> None:
    from raypack.observe.tail import follow, is_live, steps_of

    if not is_live(run):
        console.print(f"{run} does not run any more", highlight=False)
        return
    try:
        with RunView(console, steps_of(run)) as view:
            for records in follow(run):
                view.show(records)
    except KeyboardInterrupt:
        console.print("the run goes on", highlight=False)


def _compare(
    runs: tuple[Path, Path],
    summaries: tuple[Summary, Summary],
    records: tuple[list[StepRecord], list[StepRecord]],
    console: Console,
    json_target: str | None,
) -> None:
    from raypack.observe.compare import compare, comparison_table
    from raypack.observe.page import config_text

    made = compare(summaries, records, (config_text(runs[0]), config_text(runs[1])))
    if json_target is not None:
        write_json(made.to_data(), json_target)
    console.print(comparison_table(made))


def _plan(run: Path, step: int, records: Sequence[StepRecord]) -> tuple[Plan, str]:
    from raypack.observe.stored_plan import plan_of

    return plan_of(run, step, records)


def _show_plan(
    run: Path, plan: Plan, where: str, picture: str | None, console: Console, json_target: str | None
) -> None:
    from raypack.observe.stored_plan import costing, plan_table, run_config

    if picture:
        from raypack.observe.pictures import draw_plans

        draw_plans([plan], *costing(run_config(run)), picture)
    if json_target is not None:
        write_json(plan.to_data(), json_target)
    console.print(plan_table(plan, where))


def _write_page(
    target: str,
    run: Path,
    records: Sequence[StepRecord],
    summary: Summary,
    plan: Plan | None = None,
    where: str = "",
) -> None:
    # matplotlib takes most of a second to import; only pages and pictures need it.
    from raypack.observe.page import config_text, page

    shown, rows = _drawn(run, plan, where) if plan else (None, "")
    write_text(page(summary, records, config_text(run), shown, rows), target)


def _drawn(run: Path, plan: Plan, where: str) -> tuple[Plot, str]:
    """The plan as a plot of the page, and its table as text."""
    from raypack.observe.pictures import plan_figure
    from raypack.observe.plots import Plot, svg_text
    from raypack.observe.stored_plan import costing, plan_table, run_config

    title = f"Plan of step {plan.step}"
    about = f"Ranks down, time across, as the cost model sees it; {where}."
    figure = plan_figure([plan], *costing(run_config(run)))
    text = io.StringIO()
    Console(file=text, width=120).print(plan_table(plan, where))
    return Plot(title, about, svg_text(figure, title)), text.getvalue()
