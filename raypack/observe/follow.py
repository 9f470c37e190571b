"""Fetches the observer's records for the console, in a thread beside the driver's wait for the run."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from raypack.observe.attempts import read_attempts, sentence
from raypack.observe.console import RunView


class Follower:
    """Context manager: while it is open, every new record is shown, within `interval` seconds or so.

    So is what happens to the worker groups, from the second on: the first one starts as everybody expects.
    """

    def __init__(
        self, observer: Any, view: RunView, run_dir: Path, interval: float = 0.5, timeout: float = 10.0
    ) -> None:
        """`observer` = the actor; `timeout` seconds for one answer of it, after which it is asked again."""
        self._observer, self._view, self._run_dir = observer, view, run_dir
        self._events = len(read_attempts(run_dir))
        self._first = True
        self._interval, self._timeout = interval, timeout
        self._count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raypack-follower", daemon=True)

    def __enter__(self) -> Follower:
        self._view.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * self._timeout)
        self._view.__exit__(kind, error, trace)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._poll()
        self._poll()

    def _poll(self) -> None:
        # Late or restarting: the next poll asks for the same records again.
        with contextlib.suppress(ray.exceptions.RayError):
            count, records = ray.get(self._observer.since.remote(self._count), timeout=self._timeout)
            self._view.show(records)
            self._count = count
        events = read_attempts(self._run_dir)[self._events :]
        self._events += len(events)
        for event in events:
            if not self._first and (event.event, event.reason) != ("ended", "finished"):
                self._view.say(sentence(event))
            self._first = False
