"""Where a run is between two records: rank 0 says it to the observer twice a second, for people who watch.

Nothing waits for a pulse and nothing is lost with one: the next says the same and more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import ray

SECONDS = 0.5
# With this phase over, the first step has begun.
FIRST_PLAN = "plan_wait"


class Pulse(NamedTuple):
    """Of one rank.

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

    def __init__(self, observer: Any, pulse: Callable[[], Pulse], interval: float = SECONDS) -> None:
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
