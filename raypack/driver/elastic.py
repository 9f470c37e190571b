"""What Ray Train's controller does for a run: number the worker groups, warn them, and say where they were.

Ray kills workers at a scheduled resize without notice, and tells them of a preemption only if they ask together. Here
the controller itself asks all ranks to save and leave, through their processes' main threads, so that nothing done is
lost (`loop` agrees on the step). What may be tried again is judged in `verdicts`, the size of a group in `room`.

Written against Ray 2.60: the callback classes are Ray Train's developer API.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.train import WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import PreemptingState, ResizingState
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from raypack.comm.faults import is_echo
from raypack.config import Config
from raypack.driver.ending import is_death, reason_of
from raypack.driver.room import NodesInReach
from raypack.driver.verdicts import RunFailures, is_leaving
from raypack.observe.attempts import AttemptLog
from raypack.training.progress import (
    ANSWER_SECONDS,
    Whereabouts,
    ask_to_leave,
    begin_attempt,
    described,
    stuck_ranks,
    whereabouts,
)

LEFT, LATE = "left as asked", "was asked to leave, and ended before it had"
POLL_SECONDS = 0.1


class WholeGroup(WorkerGroup):  # type: ignore[misc]
    """A worker group that is there or not: Ray leaves workers and their room behind where one dies late in its start,
    and the next group waits for that room."""

    def _start(self) -> None:
        try:
            super()._start()
        except Exception as error:
            if self.has_started():
                self._worker_group_state.shutdown()
                self._clear_state()
            if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.GetTimeoutError):
                raise WorkerGroupStartupFailedError(f"a worker did not start: {reason_of(error)}") from error
            raise


class WorkerGroups(ControllerCallback, WorkerGroupCallback):
    """Numbers worker groups from `first_attempt`, and asks the running one to leave before a resize or preemption.

    `observer` = the actor, told of each new attempt.
    """

    def __init__(self, config: Config, run_dir: str, observer: Any, first_attempt: int) -> None:
        self._config, self._observer = config, observer
        self._log = AttemptLog(Path(run_dir))
        self._attempt = first_attempt - 1
        self._group: Any = None
        self._asked = self._ended = self._late = False

    def after_controller_start(self, train_run_context: Any) -> None:
        TrainController.worker_group_cls = WholeGroup  # in the controller's own process

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._attempt += 1
        self._group, self._asked, self._ended, self._late = worker_group, False, False, False
        limit = self._config.timeouts.actor
        ray.get(worker_group.execute_async(begin_attempt, self._attempt), timeout=limit)
        self._observer.begin.remote(self._attempt, len(worker_group))

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        self._log.add("started", self._attempt, world=len(worker_group))

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if isinstance(current_state, PreemptingState):
            info = current_state.preemption_info
            self._ask(f"ranks {', '.join(map(str, info.preempted_ranks))} are on nodes that will be taken away")
        elif isinstance(current_state, ResizingState):
            self._ask(f"resize to {current_state.scaling_decision.num_workers} workers")
            self._wait_until_left()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        if worker_group_status.errors and not self._ended:
            self._ended = True
            error = worker_group_status.get_worker_group_error()
            if is_leaving(error):
                self._log.add("ended", self._attempt, reason=LEFT)
                return
            where = self._where(error)
            reason, stuck = reason_of(error), stuck_ranks(where)
            if stuck and all(is_echo(failure) for failure in error.worker_failures.values()):
                reason = f"{stuck} ({reason})"
            self._log.add("ended", self._attempt, reason=reason, ranks=described(where))

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        if not self._ended:
            self._ended = True
            reason = LATE if self._late else LEFT if self._asked else "finished"
            self._log.add("ended", self._attempt, reason=reason)
        self._group = None

    def _ask(self, reason: str) -> None:
        if not self._asked and self._group is not None:
            self._asked = True
            self._log.add("asked", self._attempt, reason=reason)
            self._group.execute_async(ask_to_leave, reason)

    def _wait_until_left(self) -> None:
        """Until rank 0 has ended, at most `timeouts.leave` seconds: all leave together, after the checkpoint."""
        deadline = time.monotonic() + self._config.timeouts.leave
        self._late = True
        with suppress(ray.exceptions.RayError):
            while time.monotonic() < deadline:
                where: Whereabouts = ray.get(
                    self._group.execute_single_async(0, whereabouts), timeout=self._config.timeouts.actor
                )
                if where.over:
                    self._late = False
                    return
                time.sleep(POLL_SECONDS)

    def _where(self, error: WorkerGroupError) -> dict[int, Whereabouts | None]:
        """Where each rank is that is not known to be dead; None = it does not answer."""
        if self._group is None:
            return {}
        dead = {rank for rank, failure in error.worker_failures.items() if is_death(failure)}
        asked = {
            self._group.execute_single_async(rank, whereabouts): rank
            for rank in range(len(self._group))
            if rank not in dead
        }
        if not asked:
            return {}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        found: dict[int, Whereabouts | None] = dict.fromkeys(sorted(asked.values()))
        for each in answered:
            with suppress(ray.exceptions.RayError):
                found[asked[each]] = ray.get(each)
        return found


class RunTrainer(TorchTrainer):  # type: ignore[misc]
    """Ray's trainer with this run's policies; leaves Ctrl-C to the driver.

    Ray's own handler of Ctrl-C waits for a controller that may be busy starting workers.
    """

    def __init__(self, *args: Any, run: Config, run_dir: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run, self._run_dir = run, run_dir

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        failures = RunFailures(self.run_config.failure_config, self._run, self._run_dir)
        controller_init_kwargs.update(failure_policy=failures)
        if self._run.topology.elastic:
            room = NodesInReach(self.scaling_config, self._run.timeouts.nodes)
            controller_init_kwargs.update(scaling_policy=room)
        return super()._initialize_and_run_controller(**controller_init_kwargs)

    def _register_sigint_handler(self, controller: Any) -> None:
        pass
