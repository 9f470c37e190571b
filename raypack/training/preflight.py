"""Checks that need Ray but no worker: the cluster, its resources, and paths that every node must see."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypack.config import Config
from raypack.errors import RaypackError


@contextmanager
def connect(config: Config) -> Iterator[None]:
    """Join the cluster of `run.ray_address` or of the surrounding job, else start a local one with a CPU per worker.

    Raises:
        RaypackError: nothing answers at the address.
    """
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(config.timeouts.start)
    # The controller's own polling; the default of 2 s would dominate short runs.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    address = config.run.ray_address or os.environ.get("RAY_ADDRESS", "")
    if address and address != "local":
        _join(address)
    else:
        topology = config.topology
        ray.init(
            address="local",
            num_cpus=max(1, -int(-topology.workers * topology.cpus_per_worker // 1)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise RaypackError(
            f"no Ray cluster at {address}: {reason[0] if reason else type(error).__name__}; "
            "start one, correct run.ray_address, or leave it empty for a local one"
        ) from None


def check_resources(config: Config) -> None:
    """Raises RaypackError where the cluster, as it is, has too few CPUs or GPUs for the workers."""
    have = ray.cluster_resources()
    topology = config.topology
    for name, each in (("CPU", topology.cpus_per_worker), ("GPU", topology.gpus_per_worker)):
        need, there = topology.workers * each, have.get(name, 0.0)
        if need > there + 1e-9:
            raise RaypackError(
                f"topology.workers = {topology.workers} need {need:g} {name} ({each:g} each), the Ray cluster has "
                f"{there:g}: lower topology.workers or {name.lower()}s_per_worker, or add nodes"
            )


def check_places(run_dir: Path, corpus: Path, timeout: float) -> None:
    """On every node: the corpus can be read and the run directory is the same one.

    Raises:
        RaypackError: names the node and the path.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    token = f".seen-{uuid.uuid4().hex}"
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / token).touch()
    try:
        asked = {
            node["NodeManagerAddress"]: _look.options(  # type: ignore[attr-defined]
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(str(run_dir / token), str(corpus / "corpus.json"))
            for node in nodes
        }
        for name, answer in asked.items():
            try:
                missing = ray.get(answer, timeout=timeout)
            except ray.exceptions.RayError as error:
                raise RaypackError(f"node {name} did not answer the preflight: {str(error).splitlines()[0]}") from None
            if missing:
                raise RaypackError(
                    f"node {name} does not see {Path(missing).parent}: put run.root and data.corpus on storage that "
                    "all nodes share"
                )
    finally:
        (run_dir / token).unlink(missing_ok=True)


@ray.remote
def _look(*paths: str) -> str:
    """The first of the paths that this node does not see."""
    return next((path for path in paths if not os.path.exists(path)), "")
