"""What a person reads of a run: a step as a line or a table's row, and the summary."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from raypack.observe.record import Bytes, StepRecord, by_scope
from raypack.observe.summary import Summary

COLUMNS = (
    "step", "loss", "held-out", "tokens/s", "MFU", "planned s", "measured s", "x static", "x dynamic", "parents",
    "children", "inter MB",
)  # fmt: skip
# A narrow terminal has what fits, taken in this order.
IMPORTANCE = (
    "step", "loss", "measured s", "x static", "x dynamic", "parents", "children", "tokens/s", "held-out", "planned s",
    "MFU", "inter MB",
)  # fmt: skip
# Between columns.
GAP = 2


def cells(record: StepRecord) -> dict[str, str]:
    """A record as text, one entry for each of `COLUMNS`; "" where there is nothing to say."""
    values = (
        f"{record.step}" + ("" if record.attempt == 0 else f" (attempt {record.attempt})"),
        "skipped" if record.complete and not record.applied else figure(record.loss, "{:.4f}"),
        "" if record.heldout_loss is None else f"{record.heldout_loss:.4f}",
        figure(record.tokens_per_second, "{:,.0f}"),
        percent(record.mfu),
        figure(record.plan_step_seconds, "{:.2f}"),
        f"{record.seconds:.2f}",
        times(record.static_step_seconds, record.plan_step_seconds),
        times(record.dynamic_step_seconds, record.plan_step_seconds),
        widths(record.parent_widths),
        widths(record.child_widths),
        megabytes(by_scope(record.comparable_bytes)["inter"]),
    )
    return dict(zip(COLUMNS, values, strict=True))


def line(record: StepRecord, steps: int, left: str = "") -> str:
    """A record as one line of plain text; `steps` = of the whole run, 0 where that is not known; `left` = `time_left`
    after it."""
    named = cells(record)
    parts = [f"step {named.pop('step')}" + (f" ({record.step + 1} of {steps})" if steps else "")]
    parts += [f"{name} {value}" for name, value in named.items() if value]
    return "  ".join(parts + [left] * bool(left)) + ("" if record.complete else "  incomplete")


def fitting(sizes: Mapping[str, int], width: int) -> list[str]:
    """The columns of `sizes` (characters of each) that a terminal of `width` has room for, by `IMPORTANCE`."""
    taken: set[str] = set()
    room = width + GAP
    for name in IMPORTANCE:
        if name in sizes and (not taken or sizes[name] + GAP <= room):
            taken.add(name)
            room -= sizes[name] + GAP
    return [name for name in COLUMNS if name in taken]


def summary_table(summary: Summary) -> Table:
    """Everything worth a line, for people."""
    table = Table(title=f"run {summary.run}" if summary.run else None, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in summary_rows(summary):
        table.add_row(name, Text(value))
    return table


def summary_rows(s: Summary) -> list[tuple[str, str]]:
    """(name, text) of all that is worth a line."""
    extras = [
        f"{count} {what}"
        for what, count in (
            ("skipped", s.skipped_steps),
            ("replayed", s.replayed_steps),
            ("incomplete", s.incomplete_steps),
        )
        if count
    ]
    rows = [
        ("ended", s.stop_reason or "no word of it: still running, or killed"),
        ("steps", f"{s.steps}" + (f" ({', '.join(extras)})" if extras else "")),
        ("ranks", " then ".join(map(str, s.worlds)) + f", {s.restarts} restarts"),
        ("loss", f"{figure(s.first_loss, '{:.4f}')} -> {figure(s.last_loss, '{:.4f}')}"),
    ]
    if s.heldout_losses:
        rows.append(("held-out loss", " -> ".join(f"{loss:.4f} (step {step})" for step, loss in _ends(s))))
    peak = f" of {s.peak_source}" if s.peak_source and s.mfu is not None else ""
    rows += [
        ("tokens", f"{s.tokens:,} in {s.seconds:,.1f} s: {figure(s.tokens_per_second, '{:,.0f}')} tokens/s"),
        ("seconds a step", f"mean {figure(s.mean_step_seconds)}, median {figure(s.median_step_seconds)}"),
        ("phases", _phases(s)),
        ("MFU", percent(s.mfu) + peak),
        ("plan", f"{s.plan_seconds * 1e3:.1f} ms to make, {s.plan_wait_seconds * 1e3:.1f} ms waited for (medians)"),
        ("plan / bound", figure(s.plan_bound_ratio, "{:.4f}")),
        ("policies", ", ".join(f"{name}: {count}" for name, count in s.policies.items()) or "-"),
        ("parent widths", widths(s.parent_widths)),
        ("child widths", widths(s.child_widths)),
        ("modelled", worth(s) or "-"),
        *_byte_rows(s),
    ]
    if s.memory_bytes is not None:
        rows.append(("memory", f"{megabytes(s.memory_bytes)} MB on the fullest rank"))
    if s.exchange_rates:
        text = ", ".join(f"{site} {megabytes(rate)}" for site, rate in s.exchange_rates.items())
        rows.append(("MB/s of a rank", f"{text} (waiting for others included)"))
    if len(s.ends) > 1:
        rows += [(f"attempt {attempt}", reason) for attempt, reason in sorted(s.ends.items())]
    return rows + [("note", note) for note in s.notes]


def worth(s: Summary) -> str:
    """The plans of the run beside the baselines' for the same samples, all by the cost model; "" where not known."""
    own = s.plan_step_seconds
    if own is None or s.static_step_seconds is None or s.dynamic_step_seconds is None:
        return ""
    each = [f"this plan {own:,.2f} s, {_across(s.comparable_bytes)}"]
    for name, seconds, sent in (
        ("dynamic", s.dynamic_step_seconds, s.bytes_dynamic),
        ("static", s.static_step_seconds, s.bytes_static),
    ):
        each.append(f"{name} {seconds:,.2f} s ({times(seconds, own)}x), {_across(sent)}")
    return "; ".join(each)


def _across(sent: Bytes) -> str:
    return f"{megabytes(by_scope(sent)['inter'])} MB between nodes"


def _phases(s: Summary) -> str:
    """Mean of each phase that takes a millisecond or more, largest first."""
    worth = sorted(((took, name) for name, took in s.phase_seconds.items() if took >= 1e-3), reverse=True)
    return ", ".join(f"{name} {took:.3f}" for took, name in worth) or "-"


def _byte_rows(s: Summary) -> list[tuple[str, str]]:
    rows = [
        (name, _scopes(counts))
        for name, counts in (
            ("exchanges", s.comparable_bytes),
            ("as static plans", s.bytes_static),
            ("as dynamic plans", s.bytes_dynamic),
            ("other collectives", {op: b for op, b in s.collective_bytes.items() if op not in s.comparable_bytes}),
        )
        if counts
    ]
    return rows


def _ends(s: Summary) -> list[tuple[int, float]]:
    return s.heldout_losses if len(s.heldout_losses) < 2 else [s.heldout_losses[0], s.heldout_losses[-1]]


def _scopes(counts: Bytes) -> str:
    total = by_scope(counts)
    return f"{megabytes(total['intra'])} MB inside nodes, {megabytes(total['inter'])} MB across"


def figure(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def times(other: float | None, own: float | None) -> str:
    """`other` in units of `own`."""
    return "-" if other is None or not own else f"{other / own:.2f}"


def time_left(seconds: float | None) -> str:
    """`ETA 3 min 20 s`; "" where that is not known, or nothing is left."""
    return f"ETA {duration(seconds)}" if seconds else ""


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def widths(samples: dict[int, int]) -> str:
    """Samples by block width, widest first: `8:3 1:20`."""
    return " ".join(f"{width}:{count}" for width, count in sorted(samples.items(), reverse=True)) or "-"
