"""Seconds of a rank's forward and backward by layer kind, from marks between layers; costs a few microseconds each.

On a CPU a mark is a clock reading; on CUDA an event on the stream, read after the step, so that nothing waits for it.
"""

from __future__ import annotations

import time
from typing import Any

import torch

DIRECTIONS = ("forward", "backward")


class Stopwatch:
    """Adds the time between two marks to the part that the second one names."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last: Any = 0.0
        self._laps: list[tuple[tuple[str, str], Any, Any]] = []

    def start(self) -> None:
        """Time counts from here."""
        self._last = self._now()

    def mark(self, direction: str, part: str) -> None:
        """`part` is done in `direction`: the time since the mark before is its own."""
        now = self._now()
        self._laps.append(((part, direction), self._last, now))
        self._last = now

    def between(self, x: torch.Tensor, before: str, after: str) -> torch.Tensor:
        """`x` comes from `before`, goes into `after`; backward is through `after` once the gradient of `x` is there."""
        self.mark("forward", before)
        if x.requires_grad:
            x.register_hook(lambda _: self.mark("backward", after))
        return x

    def take(self) -> dict[tuple[str, str], float]:
        """`{(part, direction): seconds}` since the last call. On CUDA it waits for the last mark to be reached."""
        laps, self._laps = self._laps, []
        if self._cuda and laps:
            laps[-1][2].synchronize()
        seconds: dict[tuple[str, str], float] = {}
        for key, begun, ended in laps:
            lap = begun.elapsed_time(ended) / 1e3 if self._cuda else ended - begun
            seconds[key] = seconds.get(key, 0.0) + lap
        return seconds

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
