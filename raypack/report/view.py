"""What a person sees of a run that goes on: phases and a live table, plain lines where there is no terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segments
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raypack.observe.pace import Pace
from raypack.observe.record import StepRecord
from raypack.report.console import COLUMNS, GAP, cells, duration, fitting, line, time_left

LEGEND = (
    "planned s, x static and x dynamic (their seconds for the same samples / this plan's) are modelled; above 1 this "
    "plan is quicker. parents, children: block width:samples. inter MB: between nodes."
)
# Of a phase's line: its name, and where its text begins.
NAME, TEXT = 16, 27
REFRESHES_PER_SECOND = 4


class RunView:
    """Shows phases, and records as they come. A context manager: the terminal is as it was afterwards.

    Any thread may call it. On a terminal there is a live part: the last steps, how far the run is, and what it does now
    with a clock. Elsewhere every phase and every step is a line.
    """

    def __init__(self, console: Console, steps: int, *, table: bool = True, rows: int = 10) -> None:
        """`steps` = of the whole run, 0 where that is not known; `table` False, or no terminal: one line a step."""
        self.console = console
        self._steps, self._kept = steps, rows
        self._pace = Pace(steps)
        self._began = time.monotonic()
        self._spinner = Spinner("dots")
        # Each of these is replaced, never changed: the thread that refreshes reads them without a lock.
        self._rows: tuple[StepRecord, ...] = ()
        self._sizes: dict[str, int] = {}
        self._table: tuple[int, Segments] = (0, Segments([]))
        self._doing: tuple[str, float | None] = ("", None)
        self._left = ""
        self._live = (
            Live(console=console, get_renderable=self._picture, refresh_per_second=REFRESHES_PER_SECOND)
            if table and console.is_terminal and not console.is_dumb_terminal
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
            self._pace.add(record)
            self._left = time_left(self._pace.eta_seconds)
            self._rows = (*self._rows, record)[-self._kept :]
            row = cells(record)
            self._sizes = {
                name: max(self._sizes.get(name, len(name)), len(row[name]))
                for name in COLUMNS
                if row[name] or name in self._sizes
            }
            if self._live is None:
                self.say(line(record, self._steps, self._left))
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
        for record in self._rows[-room:]:
            row = cells(record)
            table.add_row(*(row[name] for name in columns), style="" if record.complete else "red")
        return width, Segments(self.console.render(table))

    def _progress(self) -> Table:
        done = self._rows[-1].step + 1
        words = f"{done} of {self._steps} steps  {duration(time.monotonic() - self._began)} so far  {self._left}"
        progress = Table.grid(padding=(0, 1))
        progress.add_row(ProgressBar(total=self._steps, completed=done, width=30), words.rstrip())
        return progress
