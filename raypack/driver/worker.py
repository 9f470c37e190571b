"""What every Ray Train worker runs: the attempt's loop, between Ray's actors and the process group that Ray set up."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from raypack.comm.faults import is_echo
from raypack.config import Config
from raypack.driver.planner import PlanSource
from raypack.observe.reporter import SEND_SECONDS, Pulses, Reporter
from raypack.plan.places import topology_of
from raypack.plan.topology import Topology
from raypack.training.loop import Job, Seat, train
from raypack.training.progress import here

# A rank that only lost another one fails this much later than it noticed: the run's reason is the cause, not its echo.
ECHO_SECONDS = 3.0
# How long a rank that is done, or failed, waits for its last reports to be on record.
REPORT_SECONDS = 10.0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class WorkerSettings:
    """What the driver hands to every worker; plain data and actor handles."""

    job: Job
    planner: Any
    observer: Any


def train_worker(arguments: dict[str, Any]) -> None:
    """The train loop of one worker (Ray Train has initialised the process group)."""
    settings: WorkerSettings = arguments["settings"]
    config = settings.job.config
    reporter = Reporter(settings.observer, interval=SEND_SECONDS)
    here().enter("places")
    # For people rank 0 is enough: where it waits for the others it says so.
    pulses = Pulses(settings.observer, here().pulse) if dist.get_rank() == 0 else nullcontext()
    try:
        with pulses:
            train(settings.job, _seat(settings, reporter))
    except Exception as error:
        if is_echo(error):
            time.sleep(ECHO_SECONDS)
        raise
    finally:
        reporter.close(min(REPORT_SECONDS, config.timeouts.actor))


def _seat(settings: WorkerSettings, reporter: Reporter) -> Seat:
    config, progress = settings.job.config, here()
    device = ray.train.torch.get_device() if config.topology.gpus_per_worker > 0 else torch.device("cpu")
    return Seat(
        topology=_topology(config),
        device=device,
        progress=progress,
        plans=lambda topology: PlanSource(settings.planner, progress.attempt, topology, config.timeouts.plan),
        send=reporter.send,
        flush=reporter.flush,
        on_record=OnRecord(settings.observer, progress.attempt, min(REPORT_SECONDS, config.timeouts.actor)),
        save_failed=partial(settings.observer.checkpoint_failed.remote, progress.attempt),
    )


def _topology(config: Config) -> Topology:
    """Of the machines, or of the run file where it overrides them."""
    place = (ray.get_runtime_context().get_node_id(), ray.train.get_context().get_local_rank())
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    found = topology_of(places)
    return Topology(config.topology.nodes) if config.topology.nodes else found


@dataclass(frozen=True)
class OnRecord:
    """Waits until a step of `attempt` is on the observer's record, at most `timeout` seconds. Any thread may call it.

    Observing never stops training: where the observer cannot say so in time, the caller goes on.
    """

    observer: Any
    attempt: int
    timeout: float

    def __call__(self, step: int) -> None:
        deadline = time.monotonic() + self.timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                if step in ray.get(self.observer.receipt.remote(self.attempt), timeout=left).settled:
                    return
            except ray.exceptions.RayError:
                pass  # it starts again, or is gone for good
            time.sleep(min(POLL_SECONDS, left))
