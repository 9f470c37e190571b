"""What a person sees: a live table during a run, plain lines where there is no terminal, a summary at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypack.observe.record import Bytes, StepRecord, by_scope
from raypack.observe.summary import Summary

COLUMNS = (
    "step", "loss", "held-out", "tokens/s", "MFU", "seconds", "plan wait", "parents", "children",
    "intra MB", "inter MB", "static inter MB",
)  # fmt: skip
# What a narrow terminal goes without, first to last.
DISPENSABLE = ("children", "parents", "seconds", "plan wait", "MFU")


def cells(record: StepRecord) -> dict[str, str]:
    """A record as text, one entry for each of `COLUMNS`; "" where there is nothing to say."""
    sent = by_scope(record.comparable_bytes)
    values = (
        f"{record.step}" + ("" if record.attempt == 0 else f" (attempt {record.attempt})"),
        "skipped" if record.complete and not record.applied else figure(record.loss, "{:.4f}"),
        "" if record.heldout_loss is None else f"{record.heldout_loss:.4f}",
        figure(record.tokens_per_second, "{:,.0f}"),
        percent(record.mfu),
        f"{record.seconds:.2f}",
        f"{record.plan_wait_seconds * 1e3:.1f} ms",
        widths(record.parent_widths),
        widths(record.child_widths),
        megabytes(sent["intra"]),
        megabytes(sent["inter"]),
        megabytes(by_scope(record.bytes_static)["inter"]) if record.bytes_static else "-",
    )
    return dict(zip(COLUMNS, values, strict=True))


def line(record: StepRecord, steps: int) -> str:
    """A record as one line of plain text; `steps` = of the whole run, 0 where that is not known."""
    named = cells(record)
    parts = [f"step {named.pop('step')}" + (f" ({record.step + 1} of {steps})" if steps else "")]
    parts += [f"{name} {value}" for name, value in named.items() if value]
    return "  ".join(parts) + ("" if record.complete else "  incomplete")


def fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that have something to say, less the dispensable ones that do not fit into `width`."""
    columns = [name for name in COLUMNS if any(row[name] for row in rows)]
    for name in DISPENSABLE:
        # Two spaces between columns.
        needed = sum(max(len(c), *(len(row[c]) for row in rows)) + 2 for c in columns) - 2
        if needed <= width:
            break
        columns = [c for c in columns if c != name]
    return columns


class RunView:
    """Shows records as they come. A context manager: the terminal is as it was afterwards."""

    def __init__(self, console: Console, steps: int, *, table: bool = True, rows: int = 10) -> None:
        """`steps` = of the whole run, 0 where that is not known; `table` False, or no terminal: one line a step."""
        self._console, self._steps = console, steps
        self._rows: deque[StepRecord] = deque(maxlen=rows)
        self._live = Live(console=console, auto_refresh=False) if table and console.is_terminal else None

    def __enter__(self) -> RunView:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, records: Sequence[StepRecord]) -> None:
        self._rows.extend(records)
        if self._live is None:
            for record in records:
                self._console.print(line(record, self._steps), soft_wrap=True, markup=False, highlight=False)
        elif records:
            self._live.update(self._picture(), refresh=True)

    def say(self, text: str) -> None:
        """A line of its own, above the table."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _picture(self) -> Group:
        rows = [cells(record) for record in self._rows]
        columns = fitting(rows, self._console.width)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for record, row in zip(self._rows, rows, strict=True):
            table.add_row(*(row[name] for name in columns), style="" if record.complete else "red")
        if not self._steps:
            return Group(table)
        done = self._rows[-1].step + 1
        progress = Table.grid(padding=(0, 1))
        progress.add_row(ProgressBar(total=self._steps, completed=done, width=40), f"{done} of {self._steps} steps")
        return Group(table, progress)


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


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def widths(samples: dict[int, int]) -> str:
    """Samples by block width, widest first: `8:3 1:20`."""
    return " ".join(f"{width}:{count}" for width, count in sorted(samples.items(), reverse=True)) or "-"
