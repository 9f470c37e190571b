"""Everything that a run takes from inside Ray, in one file (`clusters.files` reads cluster files as Ray does).

Ray Train's policies and callbacks are its developer API, and what the head knows of nodes that will come or go has no
public name: either may change with any release. So a run refuses a Ray that was not tried, and what a new one needs is
seen by running the tests under it, with its version in `TESTED` and in `pyproject.toml`.
"""

# ruff: noqa: E402
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray

from raypack.clusters.check import NodeType
from raypack.errors import RaypackError

# First and last minor version; patch releases of each are taken for the same.
TESTED = ((2, 60), (2, 60))


def check_version(installed: str = ray.__version__) -> None:
    """Raises RaypackError where this Ray is none of those that were tried."""
    first, last = (".".join(map(str, version)) for version in TESTED)
    after = f"{TESTED[1][0]}.{TESTED[1][1] + 1}"
    try:
        fits = TESTED[0] <= tuple(map(int, installed.split(".")[:2])) <= TESTED[1]
    except ValueError:
        fits = False
    if not fits:
        tried = first if first == last else f"{first} to {last}"
        raise RaypackError(
            f"Ray {installed} is installed, raypack was tested with {tried}: "
            f"pip install 'ray[train,default]>={first},<{after}', on every node of the cluster"
        )


check_version()  # before the names below are asked for, which another Ray may not have

from ray._private import state as head
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.state import PreemptingState, ResizingState
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupState
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, TrainingFailedError, WorkerGroupError
from ray.train.v2.torch.torch_trainer import TorchTrainer

__all__ = [
    "ControllerCallback",
    "ControllerError",
    "FailureConfig",
    "FailureDecision",
    "FailurePolicy",
    "NoopDecision",
    "PolicyTrainer",
    "PreemptingState",
    "PreemptionError",
    "ResizeDecision",
    "ResizingState",
    "RunConfig",
    "ScalingConfig",
    "ScalingDecision",
    "SizePolicy",
    "TrainingFailedError",
    "WorkerGroupCallback",
    "WorkerGroupError",
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "WorkerGroupState",
    "autoscaler_limits",
    "autoscaler_nodes",
    "causes_of",
    "check_version",
    "decided_size",
    "draining_nodes",
    "living_workers",
    "one_line",
    "start_whole_groups",
]

WORKER_CLASS = "RayTrainWorker"
LINE_MAX = 500
# The autoscaler says -1.
UNLIMITED = 2**20


def living_workers() -> int:
    """Train workers of this run whose process is up.

    Raises:
        ray.exceptions.RaySystemError: the head does not answer.
    """
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    # Asked of the head itself: Ray's public way (`ray.util.state`) needs the dashboard.
    actors = head.actors(job_id=job, actor_state_name="ALIVE")
    return sum(actor["ActorClassName"] == WORKER_CLASS for actor in actors.values())


def draining_nodes() -> set[str]:
    """Ids of the nodes that will be taken away, as Ray Train's own preemption watcher asks for them."""
    return set(head.state.get_draining_nodes())


def autoscaler_limits() -> Mapping[str, float]:
    """The most the cluster's autoscaler may start, by resource; empty where the cluster does not grow.

    What Ray Train itself asks before it waits for workers.
    """
    return head.state.get_max_resources_from_cluster_config() or {}


def autoscaler_nodes() -> list[NodeType]:
    """Node types of the cluster's autoscaler; none where it has none, or does not say (autoscaler v1)."""
    config: Any = head.state.get_cluster_config()
    return [
        NodeType(
            group.name,
            float(group.resources.get("CPU", 0)),
            float(group.resources.get("GPU", 0)),
            0,
            group.max_count if group.max_count >= 0 else UNLIMITED,
        )
        for group in (config.node_group_configs if config else ())
    ]


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and what Ray and Python wrapped in it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        inner = getattr(seen, "health_check_failure", None) or getattr(seen, "cause", None) or seen.__cause__
        seen = inner if isinstance(inner, BaseException) else None


def one_line(error: BaseException) -> str:
    """Type and text; of a text with a traceback, as Ray's have, its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[-1] if any(line.startswith("Traceback") for line in lines) else " ".join(lines)
    named = text if text.startswith(type(error).__name__) else f"{type(error).__name__}: {text}"
    return named if len(named) <= LINE_MAX else named[:LINE_MAX] + " ..."


class WholeGroup(WorkerGroup):
    """A worker group that is there or not: Ray leaves workers and their room behind where one dies late in its start,
    and the next group waits for that room."""

    def _start(self) -> None:
        try:
            super()._start()
        except Exception as error:
            if self._worker_group_state is not None:
                self._worker_group_state.shutdown()
                self._clear_state()
            if isinstance(error, RayActorError | GetTimeoutError):
                raise WorkerGroupStartupFailedError(f"a worker did not start: {one_line(error)}") from error
            raise


def start_whole_groups() -> None:
    """In the controller's own process: from now on its groups are `WholeGroup`s."""
    TrainController.worker_group_cls = WholeGroup


def decided_size(decision: ScalingDecision) -> int:
    """Workers that a decision asks for; 0 = it leaves things as they are."""
    return decision.num_workers if isinstance(decision, ResizeDecision) else 0


class SizePolicy(ElasticScalingPolicy):
    """Ray's elastic policy, with names for what a subclass needs of its inside. Nodes that drain have no room."""

    @property
    def looked(self) -> float:
        """When a running group's size was last considered; another value = it has been, since."""
        return self._latest_monitor_time

    def room_on(self, nodes: set[str]) -> int:
        """Workers that fit on what is reserved for the run on these nodes."""
        reserved = self._get_reserved_resources() or {}
        return self._count_possible_workers({node: each for node, each in reserved.items() if node in nodes})

    def resize_to(self, workers: int) -> ScalingDecision:
        return self._get_resize_decision(workers)

    def _get_reserved_resources(self) -> dict[str, Any] | None:
        reserved = super()._get_reserved_resources()
        if not reserved:
            return reserved
        going = draining_nodes()
        return {node: each for node, each in reserved.items() if node not in going}


class PolicyTrainer(TorchTrainer):
    """Ray's trainer under the policies that it is given; leaves Ctrl-C to the driver.

    Ray's own handler of Ctrl-C waits for a controller that may be busy starting workers.
    """

    def __init__(self, *args: Any, failures: FailurePolicy, sizes: SizePolicy | None, **kwargs: Any) -> None:
        """`sizes` = None for a fixed number of workers."""
        super().__init__(*args, **kwargs)
        self._policies: dict[str, Any] = {"failure_policy": failures}
        if sizes is not None:
            self._policies["scaling_policy"] = sizes

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        return super()._initialize_and_run_controller(**{**controller_init_kwargs, **self._policies})

    def _register_sigint_handler(self, controller: Any) -> None:
        pass
