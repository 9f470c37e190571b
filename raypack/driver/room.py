"""How many workers a run starts with and grows to: nodes that are really there, not those that Ray still counts.

Ray's own count is late by as much as a node's death takes to be noticed, and a group sized by it waits in vain. Written
against Ray 2.60: the scaling classes are Ray Train's developer API.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ScalingDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy

from raypack.errors import RaypackError

POLL_SECONDS = 0.1
PROBE_SECONDS = 2.0
PROBES_AT_ONCE = 32


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
