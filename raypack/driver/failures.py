"""Why a run failed, in one line: the cause, not its echoes on the other ranks. And what of it is tried again."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from ray.exceptions import RayActorError

from raypack.checkpoint.addresses import store_of
from raypack.checkpoint.state import newest_step
from raypack.comm.faults import is_echo
from raypack.config import Config
from raypack.driver.ray_internals import (
    ControllerError,
    FailureConfig,
    FailureDecision,
    FailurePolicy,
    PreemptionError,
    TrainingFailedError,
    WorkerGroupError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    causes_of,
    one_line,
)
from raypack.errors import Leaving, LostRank, RaypackError

# A start that fails later than this after one that failed, and may take, belongs to another row of failures.
START_AGAIN_SECONDS = 120.0


def refusal_in(failures: Mapping[int, Exception]) -> RaypackError | None:
    """What raypack itself refused on a rank, if it did: the same would happen again."""
    for error in failures.values():
        for cause in causes_of(error):
            if isinstance(cause, RaypackError) and not isinstance(cause, LostRank):
                return cause
    return None


def is_death(error: BaseException) -> bool:
    """Whether the rank's process is gone."""
    return any(isinstance(cause, RayActorError) for cause in causes_of(error))


def is_leaving(error: WorkerGroupError) -> bool:
    """Whether the ranks have left as they were asked to."""
    return any(isinstance(cause, Leaving) for failure in error.worker_failures.values() for cause in causes_of(failure))


def reason_of(error: BaseException) -> str:
    """One line: what all ranks agreed on, else the first cause among the ranks' own errors, with the rank."""
    if isinstance(error, WorkerGroupError):
        return _of_ranks(dict(sorted(error.worker_failures.items())))
    if isinstance(error, ControllerError):
        return reason_of(error.controller_failure)
    if isinstance(error, RaypackError):
        return str(error)
    return one_line(error)


def _of_ranks(failures: dict[int, Exception]) -> str:
    if refusal := refusal_in(failures):
        return str(refusal)
    if not failures:
        return "a worker failed without a word"
    causes = {rank: error for rank, error in failures.items() if not is_echo(error)} or failures
    rank, error = next(iter(causes.items()))
    if is_death(error):
        return f"rank {rank}: its process died (killed, or out of memory)"
    if isinstance(error, LostRank):
        return str(error)
    if is_echo(error):
        return f"rank {rank} lost another rank: {one_line(error)}"
    return f"rank {rank}: {one_line(error)}"


class RunFailures(FailurePolicy):
    """Try again what may go better: a lost process or node, a start that failed. Not what raypack itself refuses.

    Gives up after `run.failures_max` failures in a row with no new checkpoint between them, and where workers could
    not be started for `timeouts.nodes` seconds. Leaving and preemption are no failures.
    """

    def __init__(self, failure_config: FailureConfig, config: Config, run_dir: str) -> None:
        super().__init__(failure_config)
        self._config, self._run_dir = config, run_dir
        self._failures, self._step = 0, -1
        self._first_start = self._last_start = -math.inf  # failed starts, one right after the other

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if isinstance(training_failed_error, PreemptionError):
            return FailureDecision.RETRY
        if isinstance(training_failed_error, ControllerError):
            return self._of_controller(training_failed_error)
        if isinstance(training_failed_error, WorkerGroupError):
            return self._of_workers(training_failed_error)
        return FailureDecision.RAISE

    def _of_controller(self, error: ControllerError) -> FailureDecision:
        if not isinstance(error.controller_failure, WorkerGroupStartupFailedError | WorkerGroupStartupTimeoutError):
            return FailureDecision.RAISE
        now, limits = time.monotonic(), self._config.timeouts
        if now - self._last_start > limits.start + START_AGAIN_SECONDS:
            self._first_start = now
        self._last_start = now
        return FailureDecision.RETRY if now - self._first_start < limits.nodes else FailureDecision.RAISE

    def _of_workers(self, error: WorkerGroupError) -> FailureDecision:
        if is_leaving(error):
            return FailureDecision.RETRY
        if refusal_in(error.worker_failures):
            return FailureDecision.RAISE
        causes = (cause for failure in error.worker_failures.values() for cause in causes_of(failure))
        if any(getattr(cause, "preempted", False) for cause in causes):
            return FailureDecision.RETRY
        step = newest_step(store_of(self._config, Path(self._run_dir)))
        self._failures = 1 if step > self._step else self._failures + 1
        self._step = max(step, self._step)
        return FailureDecision.RETRY if self._failures <= self._config.run.failures_max else FailureDecision.RAISE
