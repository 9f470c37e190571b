"""What a run tries again after a failure, and what ends it: Ray Train's controller asks, this answers.

Written against Ray 2.60: the failure classes are Ray Train's developer API.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from ray.train import ControllerError, FailureConfig, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2.api.exceptions import PreemptionError, TrainingFailedError

from raypack.checkpoint.storage import Store
from raypack.config import Config
from raypack.driver.ending import causes_of, refusal_in
from raypack.errors import Leaving

# A start that fails later than this after one that failed, and may take, belongs to another row of failures.
START_AGAIN_SECONDS = 120.0


class RunFailures(FailurePolicy):  # type: ignore[misc]
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
        step = Store.of(self._config, Path(self._run_dir)).newest_step()
        self._failures = 1 if step > self._step else self._failures + 1
        self._step = max(step, self._step)
        return FailureDecision.RETRY if self._failures <= self._config.run.failures_max else FailureDecision.RAISE


def is_leaving(error: WorkerGroupError) -> bool:
    """Whether the ranks have left as they were asked to."""
    return any(isinstance(cause, Leaving) for failure in error.worker_failures.values() for cause in causes_of(failure))
