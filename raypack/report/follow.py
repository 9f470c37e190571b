"""Follows a run for the console, in a thread beside the driver's wait for it: records, starts, what it does now."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from raypack.observe.attempts import read_attempts, sentence
from raypack.observe.reporter import FIRST_PLAN, Pulse
from raypack.report.view import RunView

# The phases of a rank's start (`training.loop`), for people.
START = {
    "places": ("places", "which rank is on which node"),
    "groups": ("groups", "one for every block; code, settings and corpus are the same on all ranks"),
    "model": ("model", "weights and optimizer"),
    "load": ("checkpoint", "read"),
    "held_out_plan": ("held-out plan", "of the samples whose loss is taken apart"),
    "peak": ("peak", "matrix products measured on all ranks, for MFU"),
    FIRST_PLAN: ("first plan", ""),
}
# A pulse is up to a second old when it is seen: a step that is shorter has no clock.
CLOCK_SECONDS = 1.0


class Follower:
    """Context manager: while it is open, every new record is shown, within `interval` seconds or so.

    So is how each worker group starts, and from the second on why: the first one starts as everybody expects.
    """

    def __init__(
        self,
        observer: Any,
        view: RunView,
        run_dir: Path,
        *,
        attempt: int = 0,
        workers: int = 0,
        alive: Callable[[], int] | None = None,
        interval: float = 0.5,
        timeout: float = 10.0,
    ) -> None:
        """
        Args:
            observer: the actor.
            attempt: that starts now, with
            workers: at most, of which
            alive: counts those whose process is up, and raises RayError where it cannot.
            timeout: seconds for one answer of the observer, after which it is asked again.
        """
        self._observer, self._view, self._run_dir = observer, view, run_dir
        self._start = Start(view, attempt, workers)
        self._alive = alive
        self._events = len(read_attempts(run_dir))
        self._first = True
        self._interval, self._timeout = interval, timeout
        self._count = 0
        self._last_step = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raypack-follower", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * self._timeout)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._poll()
        self._poll()

    def _poll(self) -> None:
        # Late or restarting: the next poll asks for the same records again.
        with contextlib.suppress(ray.exceptions.RayError):
            asked = [self._observer.since.remote(self._count), self._observer.pulse.remote()]
            (count, records), beat = ray.get(asked, timeout=self._timeout)
            pulse, age = beat or (None, 0.0)
            if pulse is not None and pulse.attempt > self._start.attempt:  # of a group that was not seen coming
                self._expect(pulse.attempt)
            if pulse is not None and pulse.attempt < self._start.attempt:  # of the group before
                pulse = None
            if pulse is not None:
                self._start.rank(pulse)
            self._view.show(records)
            self._count = count
            self._last_step = records[-1].step if records else self._last_step
            if pulse is not None:
                self._view.doing(*doing(pulse, age, self._last_step))
            elif self._alive is not None and not self._start.ranks and not self._stop.is_set():
                self._start.processes(self._alive())
        self._tell_events()

    def _tell_events(self) -> None:
        events = read_attempts(self._run_dir)[self._events :]
        self._events += len(events)
        for event in events:
            over = (event.event, event.reason) == ("ended", "finished")
            if not self._first and not over:
                self._view.say(sentence(event))
            self._first = False
            if event.event == "ended" and not over:
                self._expect(event.attempt + 1)

    def _expect(self, attempt: int) -> None:
        """Another worker group starts; it may run steps again."""
        self._start, self._last_step = Start(self._view, attempt, self._start.workers), -1


class Start:
    """The lines of one worker group's start: how many processes are up, then what its rank 0 says of itself.

    `ranks` = whether it has said a word.
    """

    def __init__(self, view: RunView, attempt: int, workers: int) -> None:
        self.attempt, self.workers = attempt, workers
        self._view, self._since = view, time.monotonic()
        self._up = 0
        self._connecting = self.ranks = False
        self._told = 0

    def processes(self, up: int) -> None:
        """`up` of them are there by now, and none has a rank yet."""
        self._up = up
        if up >= self.workers:
            self._connect()
        text = "process group: torch is imported, ranks connect" if self._connecting else f"workers: {self._words}"
        self._view.doing(text, time.monotonic() - self._since)

    def rank(self, pulse: Pulse) -> None:
        """Rank 0 is where `pulse` says."""
        if not self.ranks:
            self._connect()
            self._next("process group", "torch imported, ranks connected")
            self.ranks = True
        for phase, seconds in pulse.start[self._told :]:
            if phase in START:
                self._view.passed(START[phase][0], seconds, START[phase][1])
        self._told = len(pulse.start)

    def _connect(self) -> None:
        if not self._connecting:
            self._next("workers", self._words)
            self._connecting = True

    @property
    def _words(self) -> str:
        return f"{self._up} of {self.workers} up"

    def _next(self, name: str, text: str) -> None:
        now = time.monotonic()
        self._view.passed(name, now - self._since, text)
        self._since = now


def doing(pulse: Pulse, age: float, last_step: int) -> tuple[str, float | None]:
    """What the run does, and for how many seconds, by a pulse that came `age` seconds ago; `last_step` = on record.

    None where nothing is known of the seconds, or where they are too few for a pulse to tell.
    """
    if pulse.over:
        return "the ranks have ended", None
    if not pulse.start or pulse.start[-1][0] != FIRST_PLAN:
        return START.get(pulse.phase, (pulse.phase, ""))[0], pulse.seconds + age
    if pulse.step <= last_step:  # that one is over: no word of the next one yet
        return f"step {last_step + 1}", None
    phase = pulse.phase.replace("_", " ") + (f", waits in {pulse.inside}" if pulse.inside else "")
    seconds = pulse.seconds + age
    return f"step {pulse.step}: {phase}", seconds if seconds >= CLOCK_SECONDS else None
