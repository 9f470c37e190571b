"""Two runs beside each other: their figures, where their losses part, and what their configurations differ in."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from raypack.observe.record import StepRecord, by_scope
from raypack.observe.summary import Summary


@dataclass(frozen=True)
class Figure:
    """One figure of both runs; `ratio` = second / first, None where that says nothing."""

    name: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first and self.second is not None else None


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        names: of the runs.
        figures: in the order of the table.
        common_steps: effective steps that both have.
        same_samples: of them, how many have the same samples.
        largest_loss_gap: (step, relative difference of the losses) where it is largest; None without common losses.
        differing: {configuration key: (first, second)}.
    """

    names: tuple[str, str]
    figures: tuple[Figure, ...]
    common_steps: int
    same_samples: int
    largest_loss_gap: tuple[int, float] | None
    differing: Mapping[str, tuple[Any, Any]]

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        figures = {f.name: {"first": f.first, "second": f.second, "ratio": f.ratio} for f in self.figures}
        return {**asdict(self), "figures": figures, "differing": {k: list(v) for k, v in self.differing.items()}}


def compare(
    summaries: tuple[Summary, Summary],
    records: tuple[Sequence[StepRecord], Sequence[StepRecord]],
    configs: tuple[str, str] = ("", ""),
) -> Comparison:
    """Of resolved records and the text of the two `config.toml`, "" where there is none."""
    first, second = ({r.step: r for r in each if r.effective and r.sample_count} for each in records)
    common = sorted(set(first) & set(second))
    gaps = [
        (abs(b - a) / abs(a), step)
        for step in common
        if (a := first[step].loss) is not None and (b := second[step].loss) is not None and a != 0
    ]
    return Comparison(
        names=(summaries[0].run, summaries[1].run),
        figures=tuple(Figure(name, a, b) for (name, a), (_, b) in zip(*map(_figures, summaries), strict=True)),
        common_steps=len(common),
        same_samples=sum(first[s].sample_ids_digest == second[s].sample_ids_digest for s in common),
        largest_loss_gap=(max(gaps)[1], max(gaps)[0]) if gaps else None,
        differing=_differing(*(_flat(tomllib.loads(text)) for text in configs)) if all(configs) else {},
    )


def _figures(s: Summary) -> list[tuple[str, float | None]]:
    steps = s.steps or None
    sent, static = by_scope(s.comparable_bytes), by_scope(s.bytes_static)
    return [
        ("steps", s.steps),
        ("last loss", s.last_loss),
        ("last held-out loss", s.heldout_losses[-1][1] if s.heldout_losses else None),
        ("mean step seconds", s.mean_step_seconds),
        ("median step seconds", s.median_step_seconds),
        ("tokens a second", s.tokens_per_second),
        ("MFU", s.mfu),
        ("inter MB a step", sent["inter"] / 1e6 / steps if steps else None),
        ("intra MB a step", sent["intra"] / 1e6 / steps if steps else None),
        ("inter MB a step of static plans", static["inter"] / 1e6 / steps if steps and s.bytes_static else None),
        ("plan / bound", s.plan_bound_ratio),
        ("plan seconds", s.plan_seconds),
        ("plan wait seconds", s.plan_wait_seconds),
        ("restarts", s.restarts),
        ("replayed steps", s.replayed_steps),
        ("skipped steps", s.skipped_steps),
    ]


def _flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value})
    return flat


def _differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*first, *(key for key in second if key not in first)]
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def comparison_table(made: Comparison) -> Table:
    """For people: figures, then losses and samples, then settings that differ."""
    table = Table(title=f"{made.names[0]} and {made.names[1]}", title_justify="left")
    for name in ("", *made.names, "second / first"):
        table.add_column(name, justify="left" if not name else "right")
    for each in made.figures:
        table.add_row(each.name, _text(each.first), _text(each.second), _text(each.ratio))
    table.add_section()
    table.add_row("steps of both", str(made.common_steps), "", "")
    table.add_row("with the same samples", str(made.same_samples), "", "")
    if made.largest_loss_gap:
        step, gap = made.largest_loss_gap
        table.add_row("largest difference of losses", f"{gap:.2e}", f"at step {step}", "")
    table.add_section()
    for key, (first, second) in made.differing.items():
        table.add_row(key, str(first), str(second), "")
    return table


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
