"""Rank reports in, step records out: bounded, and indifferent to the order in which ranks report."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from raypack.observe.merge import merge
from raypack.observe.record import RankReport, StepRecord


class Collector:
    """Holds the reports of steps that are not complete yet, at most `pending_max` steps."""

    def __init__(self, pending_max: int = 64, clock: Callable[[], float] = time.time) -> None:
        self.pending_max = pending_max
        self._clock = clock
        self._pending: OrderedDict[tuple[int, int], dict[int, RankReport]] = OrderedDict()
        self._done: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._attempt = -1

    def add(self, report: RankReport) -> list[StepRecord]:
        """Take in a report; return what is settled by it.

        That is its step once all ranks of the attempt have reported, and as incomplete: steps of earlier attempts
        (their missing ranks are gone), and the oldest step where more than `pending_max` wait. Reports of an earlier
        attempt, and of a step that is settled, come too late and are dropped.
        """
        settled = self.begin(report.attempt)
        key = (report.attempt, report.step)
        if report.attempt < self._attempt or key in self._done:
            return settled
        reports = self._pending.setdefault(key, {})
        reports[report.rank] = report
        if len(reports) == report.world:
            settled.append(self._settle(key))
        elif len(self._pending) > self.pending_max:
            settled.append(self._settle(next(iter(self._pending))))
        return settled

    def settled(self, attempt: int) -> tuple[int, ...]:
        """Steps of `attempt` that are on record, as far back as reports may wait."""
        return tuple(step for number, step in self._done if number == attempt)

    def known(self, record: StepRecord) -> None:
        """`record` is on file already: its reports, sent again, make no second one."""
        self._mark((record.attempt, record.step))
        self._attempt = max(self._attempt, record.attempt)

    def begin(self, attempt: int) -> list[StepRecord]:
        """Attempt `attempt` runs now: whatever earlier ones left open is settled as it is."""
        if attempt <= self._attempt:
            return []
        self._attempt = attempt
        return self.flush()

    def flush(self) -> list[StepRecord]:
        """Settle all open steps as they are."""
        return [self._settle(key) for key in list(self._pending)]

    def _settle(self, key: tuple[int, int]) -> StepRecord:
        reports = self._pending.pop(key)
        self._mark(key)
        return merge([reports[rank] for rank in sorted(reports)], time=self._clock())

    def _mark(self, key: tuple[int, int]) -> None:
        self._done[key] = None
        while len(self._done) > 2 * self.pending_max:
            self._done.popitem(last=False)
