"""A comparison of runs as text: tables that fit the terminal, whatever the number of runs and the length of names."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypack.report.compare import Comparison

GAP = 2
NARROWEST = 8
Column = tuple[str, Sequence[str]]
"""Heading and cells."""


def comparison_text(made: Comparison, width: int) -> Group:
    """The runs and their letters, figures, what they have in common, settings that differ; `width` in characters."""
    names = Table(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    names.add_column(style="bold")
    names.add_column(overflow="fold")
    for letter, name in zip(made.letters, made.names, strict=True):
        names.add_row(letter, Text(name))
    parts: list[RenderableType] = [names]
    for each in side_by_side("", [f.name for f in made.figures], figure_columns(made), width):
        parts += ["", each]
    parts += ["", *map(Text, common_lines(made))]
    if made.differing:
        for each in side_by_side("settings that differ", list(made.differing), setting_columns(made), width):
            parts += ["", each]
    return Group(*parts)


def figure_columns(made: Comparison) -> list[list[Column]]:
    """For each run its values and, but for the first, their ratios to the first run's."""
    columns: list[list[Column]] = []
    for at, letter in enumerate(made.letters):
        mine: list[Column] = [(letter, [_text(f.values[at], f.name) for f in made.figures])]
        if at:
            mine.append((f"{letter} / {made.letters[0]}", [_ratio(f.ratios[at]) for f in made.figures]))
        columns.append(mine)
    return columns


def setting_columns(made: Comparison) -> list[list[Column]]:
    """For each run its values of the settings that differ; empty where a run lacks one."""
    return [
        [(letter, ["" if values[at] is None else str(values[at]) for values in made.differing.values()])]
        for at, letter in enumerate(made.letters)
    ]


def common_lines(made: Comparison) -> list[str]:
    """What steps, samples and losses have in common, a sentence each."""
    lines = [f"steps that all have: {made.common_steps}, with the same samples: {made.same_samples}"]
    if made.largest_loss_gap:
        step, gap = made.largest_loss_gap
        lines.append(f"losses lie furthest apart at step {step}: {gap:.2e} of {made.letters[0]}'s")
    return lines


def side_by_side(heading: str, labels: Sequence[str], runs: Sequence[Sequence[Column]], width: int) -> list[Table]:
    """As many tables below each other as `width` asks for, each with the labels; long cells are folded, none is cut.

    Args:
        runs: the columns of each run, which stay together.
    """
    most = max(NARROWEST, width - max(map(len, [heading, *labels])) - GAP)
    parts: list[list[Column]] = []
    room = 0
    for columns in runs:
        needed = sum(min(most, max(map(len, [name, *cells])) + GAP) for name, cells in columns)
        if needed > room:
            parts.append([])
            room = most
        parts[-1] += columns
        room -= needed
    return [_table(heading, labels, columns) for columns in parts]


def _table(heading: str, labels: Sequence[str], columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column(heading, no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", overflow="fold")
    for label, *cells in zip(labels, *(cells for _, cells in columns), strict=True):
        table.add_row(label, *map(Text, cells))
    return table


def _text(value: float | None, name: str) -> str:
    if value is None:
        return "-"
    if name == "MFU":
        return f"{100 * value:.3g} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
