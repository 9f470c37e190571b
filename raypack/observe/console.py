"""What a person sees: phases and a live table during a run, plain lines where there is no terminal, a summary."""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segments
from rich.spinner import Spinner
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
LEGEND = (
    "planned s, x static and x dynamic (their seconds for the same samples / this plan's) are modelled; above 1 this "
    "plan is quicker. parents, children: block width:samples. inter MB: between nodes."
)
# Between columns.
GAP = 2
# Of a phase's line: its name, and where its text begins.
NAME, TEXT = 16, 27
# Steps whose median says how long the rest will take.
RECENT = 10
REFRESHES_PER_SECOND = 4


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
    of it."""
    named = cells(record)
    parts = [f"step {named.pop('step')}" + (f" ({record.step + 1} of {steps})" if steps else "")]
    parts += [f"{name} {value}" for name, value in named.items() if value]
    return "  ".join(parts + [left] * bool(left)) + ("" if record.complete else "  incomplete")


def fitting(sizes: Mapping[str, int], width: int) -> list[str]:
    """The columns of `sizes` (characters of each) that a terminal of `width` has room for, by `IMPORTANCE`."""
    taken, room = set(), width + GAP
    for name in IMPORTANCE:
        if name in sizes and (not taken or sizes[name] + GAP <= room):
            taken.add(name)
            room -= sizes[name] + GAP
    return [name for name in COLUMNS if name in taken]


def time_left(records: Sequence[StepRecord], steps: int) -> str:
    """`ETA 3 min 20 s` after the last of `records`, from the median of the last ones; "" where nothing is left."""
    if not records or records[-1].step + 1 >= steps:
        return ""
    each = statistics.median(record.seconds for record in records[-RECENT:])
    return f"ETA {duration(each * (steps - records[-1].step - 1))}"


class RunView:
    """Shows phases, and records as they come. A context manager: the terminal is as it was afterwards.

    Any thread may call it. On a terminal there is a live part: the last steps, how far the run is, and what it does now
    with a clock. Elsewhere every phase and every step is a line.
    """

    def __init__(self, console: Console, steps: int, *, table: bool = True, rows: int = 10) -> None:
        """`steps` = of the whole run, 0 where that is not known; `table` False, or no terminal: one line a step."""
        self.console = console
        self._steps, self._kept = steps, rows
        self._began = time.monotonic()
        self._spinner = Spinner("dots")
        # Each of these is replaced, never changed: the thread that refreshes reads them without a lock.
        self._rows: tuple[StepRecord, ...] = ()
        self._sizes: dict[str, int] = {}
        self._table: tuple[int, Segments] = (0, Segments([]))
        self._doing: tuple[str, float | None] = ("", None)
        self._live = (
            Live(console=console, get_renderable=self._picture, refresh_per_second=REFRESHES_PER_SECOND)
            if table and console.is_terminal
            else None
        )

    def __enter__(self) -> RunView:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The live part stays as it is; what is said from now on comes below it."""
        self._doing = ("", None)
        if self._live:
            self._live.stop()

    @contextmanager
    def phase(self, name: str, text: str = "") -> Iterator[list[str]]:
        """A phase of the start: the spinner says `text` meanwhile; then it is a line, with what the list got."""
        said: list[str] = []
        started = time.monotonic()
        self.doing(f"{name}: {text}" if text else name, 0.0)
        yield said
        self.doing("")
        self.passed(name, time.monotonic() - started, "; ".join(said))

    def passed(self, name: str, seconds: float, text: str = "") -> None:
        """A line of a phase that is over."""
        self.say(f"{name:<{NAME}}{seconds:>7.1f} s  {text}".rstrip(), indent=TEXT)

    def doing(self, text: str, seconds: float | None = None) -> None:
        """What the spinner says, "" = no spinner; `seconds` = how long that has been going on, None = no clock."""
        self._doing = (text, None if seconds is None else time.monotonic() - seconds)

    def show(self, records: Sequence[StepRecord]) -> None:
        if records and not self._rows and self._live is None:
            self.say(LEGEND)
        for record in records:
            self._rows = (*self._rows, record)[-max(self._kept, RECENT) :]
            row = cells(record)
            self._sizes = {
                name: max(self._sizes.get(name, len(name)), len(row[name]))
                for name in COLUMNS
                if row[name] or name in self._sizes
            }
            if self._live is None:
                self.say(line(record, self._steps, time_left(self._rows, self._steps)))
        if records and self._live is not None:
            self._table = self._drawn()
            self._live.refresh()

    def say(self, text: str, indent: int | None = None) -> None:
        """A line of its own, above the table. On a terminal it is broken between words, to go on at column `indent`;
        None = never broken, so that what is copied from it is whole."""
        if indent is not None and self.console.is_terminal:
            text = textwrap.fill(
                text,
                self.console.width,
                subsequent_indent=" " * indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._rows:
            if self._table[0] != self.console.width:
                self._table = self._drawn()
            parts += [self._table[1], Text(LEGEND, style="dim")]
            if self._steps:
                parts.append(self._progress())
        text, since = self._doing
        if text:
            clock = "" if since is None else f"  {duration(time.monotonic() - since)}"
            self._spinner.update(text=Text(text + clock, no_wrap=True, overflow="ellipsis"))
            parts.append(self._spinner)
        return Group(*parts)

    def _drawn(self) -> tuple[int, Segments]:
        """The table for the terminal's width; drawn once a step, for it takes longer than all else in the picture."""
        width, columns = self.console.width, fitting(self._sizes, self.console.width)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0), collapse_padding=True)
        for name in columns:
            # A column that has grown keeps its width: figures stand still.
            table.add_column(name, justify="right", no_wrap=True, min_width=self._sizes[name])
        # The lines below the table, and one for the cursor.
        room = max(1, self.console.height - 5 - len(LEGEND) // max(1, width))
        for record in self._rows[-min(self._kept, room) :]:
            row = cells(record)
            table.add_row(*(row[name] for name in columns), style="" if record.complete else "red")
        return width, Segments(self.console.render(table))

    def _progress(self) -> Table:
        done = self._rows[-1].step + 1
        left = time_left(self._rows, self._steps)
        words = f"{done} of {self._steps} steps  {duration(time.monotonic() - self._began)} so far  {left}"
        progress = Table.grid(padding=(0, 1))
        progress.add_row(ProgressBar(total=self._steps, completed=done, width=30), words.rstrip())
        return progress


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


def times(other: float | None, own: float | None) -> str:
    """`other` in units of `own`."""
    return "-" if other is None or not own else f"{other / own:.2f}"


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if seconds < 10:
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
