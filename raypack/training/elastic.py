"""What Ray Train's controller does for a run: number the worker groups, warn them, and judge what may be tried again.

Ray kills workers at a scheduled resize without notice, and tells them of a preemption only if they ask together. Here
the controller itself asks all ranks to save and leave, through their processes' main threads, so that nothing done is
lost (`loop` agrees on the step). It also looks whether nodes are really there: Ray's own count is late by as much as a
node's death takes to be noticed, and a group sized by it waits in vain.

Written against Ray 2.60: the callback, scaling and failure classes are Ray Train's developer API.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.train import ControllerError, FailureConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import PreemptingState, ResizingState
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    FixedScalingPolicy,
    NoopDecision,
    ScalingDecision,
    create_scaling_policy,
)
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2.api.exceptions import PreemptionError, TrainingFailedError

from raypack.config import Config
from raypack.errors import Leaving, LostRank, RaypackError
from raypack.observe.attempts import AttemptLog
from raypack.training.ending import causes_of, is_echo, reason_of
from raypack.training.progress import Whereabouts, ask_to_leave, begin_attempt, whereabouts
from raypack.training.storage import Store

LEFT, LATE = "left as asked", "was asked to leave, and ended before it had"
ANSWER_SECONDS = 3.0
POLL_SECONDS = 0.1
PROBE_SECONDS = 2.0
PROBES_AT_ONCE = 32
# A start that fails later than this after one that failed, and may take, belongs to another row of failures.
START_AGAIN_SECONDS = 120.0


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
            if _is_leaving(error):
                self._log.add("ended", self._attempt, reason=LEFT)
                return
            where = self._where(error)
            reason, stuck = reason_of(error), stuck_ranks(where)
            if stuck and all(is_echo(failure) for failure in error.worker_failures.values()):
                reason = f"{stuck} ({reason})"
            self._log.add("ended", self._attempt, reason=reason, ranks=_described(where))

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
        dead = {rank for rank, failure in error.worker_failures.items() if _is_dead(failure)}
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
        if _is_leaving(error):
            return FailureDecision.RETRY
        causes = [cause for failure in error.worker_failures.values() for cause in causes_of(failure)]
        if any(isinstance(cause, RaypackError) and not isinstance(cause, LostRank) for cause in causes):
            return FailureDecision.RAISE
        if any(getattr(cause, "preempted", False) for cause in causes):
            return FailureDecision.RETRY
        step = Store.of(self._config, Path(self._run_dir)).newest_step()
        self._failures = 1 if step > self._step else self._failures + 1
        self._step = max(step, self._step)
        return FailureDecision.RETRY if self._failures <= self._config.run.failures_max else FailureDecision.RAISE


class NodesInReach(ElasticScalingPolicy):  # type: ignore[misc]
    """Ray's elastic policy, which starts groups only on nodes that answer and stay.

    It gives up after `timeouts.nodes` seconds without enough of them. It grows when two looks in a row find room for
    the same number: nodes come one by one, and each resize is a restart. A running group shrinks where Ray's count does
    or a node will be taken away; of one that is gone, its workers' failure tells.
    """

    def __init__(self, scaling_config: ScalingConfig, wait_seconds: float) -> None:
        super().__init__(scaling_config)
        self._wait_seconds = wait_seconds
        self._short_since: float | None = None
        self._room = 0

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        looked = self._latest_monitor_time
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if self._latest_monitor_time == looked:
            return decision  # it is not time yet
        room = getattr(decision, "num_workers", 0)
        grows, before = room > worker_group_state.num_workers, self._room
        self._room = room
        if grows and (room != before or self._room_in_reach() != room):
            return NoopDecision()
        return decision

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._room = 0
        decision = super().make_decision_for_non_running_worker_group()
        if not isinstance(decision, NoopDecision):
            room = self._room_in_reach()
            decision = self._get_resize_decision(room) if room >= self.scaling_config.min_workers else NoopDecision()
        if not isinstance(decision, NoopDecision):
            self._short_since = None
            return decision
        now = time.monotonic()
        self._short_since = now if self._short_since is None else self._short_since
        if now - self._short_since > self._wait_seconds:
            raise RaypackError(
                f"waited timeouts.nodes = {self._wait_seconds:g} s for nodes that hold topology.workers_min = "
                f"{self.scaling_config.min_workers} workers: add nodes, or lower topology.workers_min"
            )
        time.sleep(POLL_SECONDS)  # the controller asks again at once
        return decision

    def _room_in_reach(self) -> int:
        """Workers that fit on the nodes that answer now; Ray's own count may hold dead ones."""
        reserved, there = self._get_reserved_resources() or {}, nodes_in_reach()
        return self._count_possible_workers({node: each for node, each in reserved.items() if node in there})

    def _get_reserved_resources(self) -> dict[str, Any] | None:
        reserved: dict[str, Any] | None = super()._get_reserved_resources()
        if not reserved:
            return reserved
        going = draining_nodes()
        return {node: each for node, each in reserved.items() if node not in going}


class RunTrainer(TorchTrainer):  # type: ignore[misc]
    """Ray's trainer with this run's policies; leaves Ctrl-C to the driver.

    Ray's own handler of Ctrl-C waits for a controller that may be busy starting workers.
    """

    def __init__(self, *args: Any, run: Config, run_dir: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run, self._run_dir = run, run_dir

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        wait = self._run.timeouts.nodes
        policy = create_scaling_policy(self.scaling_config)
        if not isinstance(policy, FixedScalingPolicy):
            policy = NodesInReach(self.scaling_config, wait)
        failures = RunFailures(self.run_config.failure_config, self._run, self._run_dir)
        controller_init_kwargs.update(scaling_policy=policy, failure_policy=failures)
        return super()._initialize_and_run_controller(**controller_init_kwargs)

    def _register_sigint_handler(self, controller: Any) -> None:
        pass


def nodes_in_reach() -> set[str]:
    """Ids of the nodes whose raylet answers."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    with ThreadPoolExecutor(PROBES_AT_ONCE) as threads:
        answers = list(threads.map(_answers, nodes))
    return {node["NodeID"] for node, there in zip(nodes, answers, strict=True) if there}


def _answers(node: Mapping[str, Any]) -> bool:
    try:
        address = (node["NodeManagerAddress"], node["NodeManagerPort"])
        socket.create_connection(address, timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def draining_nodes() -> set[str]:
    """Ids of the nodes that will be taken away."""
    # What Ray Train's own preemption watcher asks; Ray has no public name for it.
    with suppress(ImportError, AttributeError):
        return set(ray._private.state.state.get_draining_nodes())
    return set()


def stuck_ranks(where: Mapping[int, Whereabouts | None]) -> str:
    """Who keeps the others waiting, in one clause; "" = nobody in particular.

    Ranks whose process does not answer, else, of those that wait for nobody, the ones that are furthest behind.
    """
    silent = [rank for rank, at in where.items() if at is None]
    if silent:
        return f"rank {_listed(silent)} did not answer within {ANSWER_SECONDS:g} s: it is stuck, or its node is gone"
    busy = {rank: at for rank, at in where.items() if at is not None and not at.waits}
    if not busy or len(busy) == len(where):
        return ""
    step = min(at.step for at in busy.values())
    behind = {rank: at for rank, at in busy.items() if at.step == step}
    at = next(iter(behind.values()))
    return f"rank {_listed(list(behind))} is stuck in {at.phase} of step {step}, for {at.seconds:.0f} s"


def _described(where: Mapping[int, Whereabouts | None]) -> dict[int, str]:
    return {rank: _description(at) for rank, at in where.items()}


def _description(at: Whereabouts | None) -> str:
    if at is None:
        return "no answer"
    inside = f", waiting in {at.inside}" if at.inside else ""
    return f"{at.phase} of step {at.step} for {at.seconds:.1f} s{inside}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _is_leaving(error: WorkerGroupError) -> bool:
    return any(isinstance(cause, Leaving) for failure in error.worker_failures.values() for cause in causes_of(failure))


def _is_dead(error: Exception) -> bool:
    return any(isinstance(cause, ray.exceptions.RayActorError) for cause in causes_of(error))
