"""Timing a call on all ranks together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

WARM_UP = 2


class Stopwatch:
    """Every rank makes the same calls in the same order.

    Args:
        host: CPU group of all ranks; None in a world of one.
        device: what a call runs on; waited for before and after it.
        repeats: timed calls, after `WARM_UP` that are not counted.
    """

    def __init__(self, host: dist.ProcessGroup | None, device: torch.device, repeats: int) -> None:
        self.host, self.device, self.repeats = host, device, repeats

    def seconds(self, call: Callable[[], object]) -> float:
        """Median over the repeats of the slowest rank's seconds: the same on every rank."""
        for _ in range(WARM_UP):
            self._once(call)
        return statistics.median(self._once(call) for _ in range(self.repeats))

    def _once(self, call: Callable[[], object]) -> float:
        self._wait()
        if self.host is not None:
            dist.barrier(self.host)
        started = time.perf_counter()
        call()
        self._wait()
        spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        if self.host is not None:
            dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=self.host)
        return float(spent)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
