"""How a run gets on: the seconds that count, and how long the rest will take."""

from __future__ import annotations

from array import array
from collections import deque

from raypack.observe.record import StepRecord

PACE_STEPS = 32


class Pace:
    """Fed with records in the order in which they settle."""

    def __init__(self, steps: int = 0) -> None:
        """`steps` of the whole run; 0 = not known."""
        self._steps = steps
        self._attempt = -1
        self._seconds = array("d")  # of the effective steps, by step
        self._times: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self._last: StepRecord | None = None
        self.effective_seconds = 0.0

    def add(self, record: StepRecord) -> None:
        if record.attempt > self._attempt:
            # It went on from a checkpoint: what was done from its first step on does not count any more.
            del self._seconds[record.step :]
            self.effective_seconds = sum(self._seconds)
            self._times.clear()
            self._attempt = record.attempt
        self._seconds.extend([0.0] * (record.step + 1 - len(self._seconds)))
        self.effective_seconds += record.seconds - self._seconds[record.step]
        self._seconds[record.step] = record.seconds
        self._times.append(record.time)
        self._last = record

    @property
    def goodput(self) -> float | None:
        """Share of the wall time from the run's start to the last record that effective steps took."""
        wall = self._last.run_seconds if self._last is not None else None
        return self.effective_seconds / wall if wall else None

    @property
    def eta_seconds(self) -> float | None:
        """From the last record to the end of the last step; None where that is not known."""
        if self._last is None or not self._steps:
            return None
        gaps = len(self._times) - 1
        a_step = (self._times[-1] - self._times[0]) / gaps if gaps else self._last.seconds
        return a_step * max(0, self._steps - 1 - self._last.step)
