"""`raypack inspect RUN`: what a run did, from its records."""

from __future__ import annotations

import json
from pathlib import Path

import click

from raypack.commands.common import handle_errors, json_option, people_console, write_json
from raypack.observe.console import summary_table
from raypack.observe.steps import read_steps
from raypack.observe.summary import Summary, read_summary, summarise


def load(run_dir: Path) -> Summary:
    """The figures from `steps.jsonl`; the stop reason and notes from `summary.json`, where the run left one.

    Raises:
        RaypackError: no run there, or files that are none.
    """
    left = read_summary(run_dir)
    name = left.run if left else run_dir.resolve().name
    return summarise(read_steps(run_dir), name, left.stop_reason if left else "", left.notes if left else ())


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
@handle_errors
def inspect(run: Path, json_target: str | None) -> None:
    """Summarise RUN, the directory of a run (runs/NAME): loss, time, MFU, bytes, block widths."""
    summary = load(run)
    if json_target is not None:
        write_json(json.loads(summary.to_json()), json_target)
    people_console(json_target).print(summary_table(summary))
