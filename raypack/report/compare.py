"""Runs beside each other: their figures, where their losses part, what their configurations differ in; and as text."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypack.errors import RaypackError
from raypack.observe.record import StepRecord, by_scope
from raypack.observe.run_files import CONFIG_FILE
from raypack.observe.summary import Summary
from raypack.report.stored import StoredRun

# Characters between columns, and the least that a run's columns get.
GAP = 2
NARROWEST = 8
Column = tuple[str, Sequence[str]]
"""Heading and cells."""


@dataclass(frozen=True)
class Figure:
    """One figure of all runs, None where a run lacks it."""

    name: str
    values: tuple[float | None, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each value / the first run's, None where that says nothing."""
        first = self.values[0]
        return tuple(value / first if first and value is not None else None for value in self.values)


@dataclass(frozen=True)
class Comparison:
    """Two or more runs; the first is the one that the others are measured against.

    Attributes:
        letters: a short name for each run, for columns and legends.
        names: of the runs; with their directories where two have one name.
        figures: in the order of the table.
        common_steps: effective steps that all have.
        same_samples: of them, how many have the same samples in all.
        largest_loss_gap: (step, largest difference from the first run's loss, relative) where that is largest; None
            without common losses.
        differing: {configuration key: the runs' values}.
    """

    letters: tuple[str, ...]
    names: tuple[str, ...]
    figures: tuple[Figure, ...]
    common_steps: int
    same_samples: int
    largest_loss_gap: tuple[int, float] | None
    differing: Mapping[str, tuple[Any, ...]]

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "names": list(self.names),
            "figures": {f.name: {"values": list(f.values), "ratios": list(f.ratios)} for f in self.figures},
            "common_steps": self.common_steps,
            "same_samples": self.same_samples,
            "largest_loss_gap": self.largest_loss_gap,
            "differing": {key: list(values) for key, values in self.differing.items()},
        }


def compare(runs: Sequence[StoredRun]) -> Comparison:
    """Of two or more runs.

    Raises:
        RaypackError: a `config.toml` that is no TOML.
    """
    steps = [{r.step: r for r in run.records if r.effective and r.sample_count} for run in runs]
    common = sorted(set.intersection(*map(set, steps)))
    gaps = [(gap, step) for step in common if (gap := _loss_gap([each[step] for each in steps])) is not None]
    figures = [_figures(run.summary) for run in runs]
    letters, names = letters_and_names(runs)
    return Comparison(
        letters=letters,
        names=names,
        figures=tuple(Figure(name, tuple(each[name] for each in figures)) for name in figures[0]),
        common_steps=len(common),
        same_samples=sum(len({each[step].sample_ids_digest for each in steps}) == 1 for step in common),
        largest_loss_gap=(max(gaps)[1], max(gaps)[0]) if gaps else None,
        differing=_differing([_settings(run) for run in runs]) if all(run.config for run in runs) else {},
    )


def letters_and_names(runs: Sequence[StoredRun]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A letter for each run, and its name, with its directory where another has the same name."""
    names = [run.name for run in runs]
    told = (f"{run.name} ({run.folder})" if names.count(run.name) > 1 else run.name for run in runs)
    return tuple(letter(i) for i in range(len(runs))), tuple(told)


def letter(number: int) -> str:
    """A, B, ..., Z, AA, AB, ... of 0, 1, ..."""
    before, at = divmod(number, 26)
    return (letter(before - 1) if before else "") + chr(ord("A") + at)


def _loss_gap(records: Sequence[StepRecord]) -> float | None:
    first, *others = [record.loss for record in records]
    known = [loss for loss in others if loss is not None]
    return max(abs(loss - first) / abs(first) for loss in known) if first and known else None


def _figures(s: Summary) -> dict[str, float | None]:
    steps = s.steps or None
    sent, static = by_scope(s.comparable_bytes), by_scope(s.bytes_static)
    return {
        "steps": s.steps,
        "last loss": s.last_loss,
        "last held-out loss": s.heldout_losses[-1][1] if s.heldout_losses else None,
        "mean step seconds": s.mean_step_seconds,
        "median step seconds": s.median_step_seconds,
        "tokens a second": s.tokens_per_second,
        "MFU": s.mfu,
        "inter MB a step": sent["inter"] / 1e6 / steps if steps else None,
        "intra MB a step": sent["intra"] / 1e6 / steps if steps else None,
        "inter MB as static plans": static["inter"] / 1e6 / steps if steps and s.bytes_static else None,
        "x static, modelled": _ratio(s.static_step_seconds, s.plan_step_seconds),
        "x dynamic, modelled": _ratio(s.dynamic_step_seconds, s.plan_step_seconds),
        "plan / bound": s.plan_bound_ratio,
        "plan seconds": s.plan_seconds,
        "plan wait seconds": s.plan_wait_seconds,
        "restarts": s.restarts,
        "replayed steps": s.replayed_steps,
        "skipped steps": s.skipped_steps,
    }


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _settings(run: StoredRun) -> dict[str, Any]:
    try:
        return _flat(tomllib.loads(run.config))
    except tomllib.TOMLDecodeError as error:
        raise RaypackError(f"cannot read {run.folder / CONFIG_FILE}: {error}") from None


def _flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value})
    return flat


def _differing(settings: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    keys = dict.fromkeys(key for each in settings for key in each if key != "run.name")  # the table has the names
    found = {key: tuple(each.get(key) for each in settings) for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def comparison_text(made: Comparison, width: int) -> Group:
    """The runs and their letters, figures, what they have in common, settings that differ.

    Tables fit the terminal of `width` characters, whatever the number of runs and the length of names.
    """
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
            mine.append((f"{letter} / {made.letters[0]}", [_times(f.ratios[at]) for f in made.figures]))
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


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
