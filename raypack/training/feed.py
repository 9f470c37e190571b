"""Plans and tokens, a step ahead: one thread a rank fetches the next plan and prepares its work beside the compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from raypack.errors import RaypackError
from raypack.plan.plan import Plan, StreamState
from raypack.planning.steps import PlannedStep
from raypack.training.work import StepWork

Prepare = Callable[[Plan], StepWork]


@dataclass(frozen=True)
class Fed:
    """What the loop gets for a step; `trouble` in place of `work` where this rank could not get or prepare it.

    `wait_seconds` = how long the loop stood still for the plan (not for preparing), `prepare_seconds` = host time of
    frames and tokens, beside the step before.
    """

    planned: PlannedStep | None
    work: StepWork | None
    trouble: str | None
    wait_seconds: float
    prepare_seconds: float


class Plans(Protocol):
    """Where plans come from; on Ray the planner actor (`driver.planner.PlanSource`)."""

    def step(self, step: int, before: StreamState) -> PlannedStep:
        """Raises RaypackError: why there is no plan."""

    def held_out(self) -> Plan | None: ...


class Feed:
    """Steps in order. `next` returns one and starts on the one after it.

    Args:
        source: plans.
        prepare: a plan -> this rank's work.
        step, state: where to begin.
        steps: one past the last step.
    """

    def __init__(self, source: Plans, prepare: Prepare, step: int, state: StreamState, steps: int) -> None:
        self._source, self._prepare, self._steps = source, prepare, steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._planned: Future[PlannedStep] | None = None
        self._work: Future[tuple[StepWork, float]] | None = None
        self._step = step
        if step < steps:
            self._ask(state)

    def next(self) -> Fed:
        """The next step's plan and work. Never raises for a fault of this rank: it must reach the agreement."""
        assert self._planned is not None
        assert self._work is not None
        started = time.perf_counter()
        planned: PlannedStep | None = None
        try:
            planned = self._planned.result()
            waited = time.perf_counter() - started
            work, prepared = self._work.result()
        except Exception as error:
            text = str(error) if isinstance(error, RaypackError) else f"{type(error).__name__}: {error}"
            return Fed(planned, None, text, time.perf_counter() - started, 0.0)
        self._step += 1
        if self._step < self._steps:
            assert planned.plan.after is not None
            self._ask(planned.plan.after)
        return Fed(planned, work, None, waited, prepared)

    def _ask(self, state: StreamState) -> None:
        planned = self._thread.submit(self._source.step, self._step, state)
        self._planned, self._work = planned, self._thread.submit(self._prepared, planned)

    def _prepared(self, planned: Future[PlannedStep]) -> tuple[StepWork, float]:
        plan = planned.result().plan  # ready: the same single thread ran it before
        started = time.perf_counter()
        work = self._prepare(plan)
        plan.digest  # noqa: B018 - kept by the plan: the agreement before the step needs it at once
        return work, time.perf_counter() - started

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
