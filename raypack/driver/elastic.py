"""What Ray Train's controller does for a run: number the worker groups, warn them, size them, say where they were.

Ray kills workers at a scheduled resize without notice, and tells them of a preemption only if they ask together. Here
the controller itself asks all ranks to save and leave, through their processes' main threads, so that nothing done is
lost (`training.loop` agrees on the step). And Ray's own count of nodes is late by as much as a node's death takes to be
noticed: a group sized by it waits in vain. What may be tried again is judged in `failures`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from raypack.comm.faults import is_echo
from raypack.config import Config
from raypack.driver.failures import is_death, is_leaving, reason_of
from raypack.driver.ray_internals import (
    ControllerCallback,
    NoopDecision,
    PreemptingState,
    ResizingState,
    ScalingConfig,
    ScalingDecision,
    SizePolicy,
    WorkerGroupCallback,
    WorkerGroupError,
    decided_size,
    draining_nodes,
    start_whole_groups,
)
from raypack.errors import RaypackError
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
PROBE_SECONDS = 2.0
PROBES_AT_ONCE = 32


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
        start_whole_groups()

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
            size = decided_size(current_state.scaling_decision)
            # Ray's watcher of nodes that go and the sizing of groups both see them: the first to look asks.
            shrinks = self._group is not None and size < len(self._group) and draining_nodes()
            self._ask(f"resize to {size} workers" + (": nodes will be taken away" if shrinks else ""))
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


class NodesInReach(SizePolicy):
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
        looked = self.looked
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if self.looked == looked:
            return decision  # it is not time yet
        room = decided_size(decision)
        grows, before = room > worker_group_state.num_workers, self._room
        self._room = room
        if grows and (room != before or self.room_on(nodes_in_reach()) != room):
            return NoopDecision()
        return decision

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._room = 0
        decision = super().make_decision_for_non_running_worker_group()
        if not isinstance(decision, NoopDecision):
            room = self.room_on(nodes_in_reach())  # Ray's own count may hold dead ones
            decision = self.resize_to(room) if room >= self.scaling_config.min_workers else NoopDecision()
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
