"""Calibration on a Ray cluster: Ray Train starts the ranks, as it does for a run, and rank 0's figures come back."""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from raypack.calibrate.measure import measure
from raypack.calibrate.result import Measurements, Wanted
from raypack.config import Config, RunSection, TimeoutSection, TopologySection
from raypack.driver.nodes import check_resources
from raypack.driver.ray_cluster import connected
from raypack.errors import RaypackError
from raypack.plan.places import topology_of


def ray_ranks(address: str, ranks: int, kind: str, wanted: Wanted) -> Measurements:
    """Run `measure` on `ranks` workers of the cluster at `address`; `auto` = the surrounding one, `local` = a new one.

    Args:
        kind: `cuda` gives each worker a GPU, `cpu` a CPU.

    Raises:
        RaypackError: no cluster, too few CPUs or GPUs, or a worker that failed.
    """
    topology = TopologySection(workers=ranks, gpus_per_worker=1.0 if kind == "cuda" else 0.0)
    config = Config(
        run=RunSection(ray_address=address), topology=topology, timeouts=TimeoutSection(start=wanted.timeout)
    )
    with connected(config), tempfile.TemporaryDirectory(prefix="raypack-calibrate-") as folder:
        check_resources(config.topology)
        box: Any = _Box.remote()  # type: ignore[attr-defined]
        trainer = TorchTrainer(
            _worker,
            train_loop_config={"wanted": wanted, "box": box},
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu=kind == "cuda"),
            run_config=RunConfig(name="calibrate", storage_path=folder, failure_config=FailureConfig(max_failures=0)),
            torch_config=TorchConfig(timeout_s=int(wanted.timeout)),
        )
        try:
            trainer.fit()
            answer: Any = ray.get(box.take.remote(), timeout=wanted.timeout)
        except ray.train.TrainingFailedError as error:
            raise RaypackError(f"calibrate: {_last_line(error)}") from None
        except ray.exceptions.RayError as error:
            raise RaypackError(f"calibrate: {str(error).splitlines()[0]}") from None
    if not isinstance(answer, Measurements):
        raise RaypackError("calibrate: the workers ended without a figure; look into their logs")
    return answer


@ray.remote(num_cpus=0)
class _Box:
    """Where rank 0 leaves the figures: Ray Train's own results need a checkpoint."""

    def __init__(self) -> None:
        self.held: Measurements | None = None

    def put(self, found: Measurements) -> None:
        self.held = found

    def take(self) -> Measurements | None:
        return self.held


def _worker(arguments: dict[str, Any]) -> None:
    wanted: Wanted = arguments["wanted"]
    context, rank = ray.train.get_context(), dist.get_rank()
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (ray.get_runtime_context().get_node_id(), context.get_local_rank()))
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    found = measure(topology_of(places), rank, device, wanted)
    if rank == 0:
        ray.get(arguments["box"].put.remote(found), timeout=wanted.timeout)
    dist.barrier()


def _last_line(error: Exception) -> str:
    failures = getattr(error, "worker_failures", None) or {}
    texts = [f"rank {rank}: {failure}" for rank, failure in sorted(failures.items())] or [str(error)]
    lines = [line.strip() for line in texts[0].splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
