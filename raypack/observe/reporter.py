"""A rank's side of observing: a report of each step, and twice a second a pulse for people who watch.

Every report is kept, up to a bound, until the observer says that its step is on record. The observer may be slow, be
killed or start again in between: whatever was not confirmed is sent again. Nothing is lost with a pulse: the next says
the same and more. The rank never waits for any of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import ray

from raypack.observe.record import RankReport

KEPT_MAX = 64
# A call costs a rank and the observer a millisecond each, whatever is in it: short steps share one.
SEND_SECONDS = 1.0
PULSE_SECONDS = 0.5
# With this phase over, the first step has begun.
FIRST_PLAN = "plan_wait"


class Receipt(NamedTuple):
    """The observer's answer to a report: who it is, and which steps of the attempt are on record."""

    instance: str
    attempt: int
    settled: tuple[int, ...]


class Reporter:
    """Args:
    observer: handle of the actor.
    kept_max: unconfirmed reports kept; the oldest go first (their steps stay incomplete).
    interval: seconds between calls; reports wait for each other as long, whatever the rank does meanwhile (`flush`
        sends at once).
    """

    def __init__(self, observer: Any, kept_max: int = KEPT_MAX, interval: float = 0.0) -> None:
        self._observer, self._kept_max, self._interval = observer, kept_max, interval
        self._kept: OrderedDict[tuple[int, int], RankReport] = OrderedDict()
        self._waiting: list[RankReport] = []
        self._called = -math.inf
        self._lock = threading.RLock()  # the timer's thread sends too
        self._timer: threading.Timer | None = None
        self._asked: list[Any] = []
        self._instance = ""
        self._lost_touch = False

    def __len__(self) -> int:
        """Reports whose step is not known to be on record."""
        return len(self._kept)

    def send(self, report: RankReport) -> None:
        """Hand over `report` and go on at once. Never raises, never waits."""
        with self._lock:
            self._kept[report.attempt, report.step] = report
            while len(self._kept) > self._kept_max:
                self._kept.popitem(last=False)
            self._waiting.append(report)
            left = self._interval - (time.monotonic() - self._called)
            if left <= 0:
                self.flush()
            elif self._timer is None:
                self._timer = threading.Timer(left, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Send what waits. Never raises, never waits."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._read_receipts()
            waiting, self._waiting = self._waiting[-self._kept_max :], []
            self._called = time.monotonic()
            if waiting:
                self._call(waiting)

    def close(self, timeout: float) -> bool:
        """Wait until all is on record, at most `timeout` seconds; whether it is."""
        deadline = time.monotonic() + timeout
        self.flush()
        while self._kept and (left := deadline - time.monotonic()) > 0:
            with self._lock:
                newest = next(reversed(self._kept.values()), None)
            if newest is None:
                break
            try:
                receipt = ray.get(self._observer.receipt.remote(newest.attempt), timeout=left)
                with self._lock:
                    self._confirm(receipt)
            except ray.exceptions.RayError:
                self._lost_touch = True
            if self._kept:
                time.sleep(min(0.05, max(0.0, left)))
        return not self._kept

    def _call(self, reports: Sequence[RankReport]) -> None:
        # An observer that answers nothing at all gets no more calls than it has reports to answer for.
        if len(self._asked) >= self._kept_max:
            return
        try:
            self._asked.append(self._observer.report.remote(*reports))
        except ray.exceptions.RayError:
            self._lost_touch = True

    def _read_receipts(self) -> None:
        if not self._asked:
            return
        answered, self._asked = ray.wait(self._asked, num_returns=len(self._asked), timeout=0)
        for each in answered:
            try:
                self._confirm(ray.get(each))
            except ray.exceptions.RayError:
                self._lost_touch = True

    def _confirm(self, receipt: Receipt) -> None:
        """Drop what is on record; send the rest again where it went to an observer that is gone."""
        for step in receipt.settled:
            self._kept.pop((receipt.attempt, step), None)
        replaced = self._instance not in (receipt.instance, "")
        self._instance = receipt.instance
        if replaced or self._lost_touch:
            self._lost_touch = False
            if self._kept:
                self._call(list(self._kept.values()))


class Pulse(NamedTuple):
    """Where a run is between two records, as one rank sees it.

    Attributes:
        step: that it is at; -1 before the first.
        seconds: since that step began; before the first, since the phase did.
        phase, inside: of the step or the start; the exchange that it waits in, "" = in none.
        start: the phases before the first step that are over, with their seconds.
        over: its loop has ended.
    """

    attempt: int
    step: int
    seconds: float
    phase: str
    inside: str
    start: tuple[tuple[str, float], ...]
    over: bool


class Pulses:
    """Context manager: while it is open, a thread sends what `pulse` says to the `observer` actor."""

    def __init__(self, observer: Any, pulse: Callable[[], Pulse], interval: float = PULSE_SECONDS) -> None:
        self._observer, self._pulse, self._interval = observer, pulse, interval
        self._asked: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raypack-pulse", daemon=True)

    def __enter__(self) -> Pulses:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=3 * self._interval)

    def _run(self) -> None:
        self._send()
        while not self._stop.wait(self._interval):
            self._send()
        self._send(wait=self._interval)  # that it is over

    def _send(self, wait: float = 0.0) -> None:
        # An observer that is slow, or starting again, gets no second one before it took the first.
        if self._asked is not None and not ray.wait([self._asked], timeout=wait)[0]:
            return
        try:
            self._asked = self._observer.beat.remote(self._pulse())
        except ray.exceptions.RayError:
            self._asked = None
