"""`raypack train`: a run from start to end; its arguments, help and exit codes are the job's."""

from __future__ import annotations

import sys

import click

from raypack.driver.job import main

ABOUT = """Train a hybrid-attention model on samples of very unequal lengths, on Ray.

raypack train                                # local: 4 CPU workers seen as 2 nodes of 2
raypack train 1f3s_gpu --data.corpus CORPUS  # 64 GPUs
raypack train mine.toml --dry-run            # check all, show the first plan"""


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="[RUN.toml | PRESET] [--section.key VALUE]...", nargs=-1, type=click.UNPROCESSED)
def train(arguments: tuple[str, ...]) -> None:
    """A run; `raypack train --help` is the job's own help."""
    sys.exit(main(arguments, description=ABOUT, program="raypack train"))
