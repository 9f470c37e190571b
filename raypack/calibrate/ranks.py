"""The ranks that a calibration runs on: processes spawned here, or those that torchrun has started.

Spawned ranks stand for one machine (or, for trials, for several); torchrun's for a real cluster. Either way a rank
ends within the time-out, and a failure is one line.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from raypack.calibrate.measure import measure
from raypack.calibrate.result import Measurements, Wanted
from raypack.comm.wire import backend_for
from raypack.errors import RaypackError
from raypack.plan.places import topology_of
from raypack.plan.topology import Topology


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys()


def device_kind(asked: str) -> str:
    """`cpu` or `cuda`; `auto` is CUDA where there is a GPU.

    Raises:
        RaypackError: CUDA asked for, and no GPU here.
    """
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise RaypackError("device = cuda: torch sees no GPU here; use --device cpu, or install torch for its driver")
    return asked


def spawn_ranks(topology: Topology, kind: str, wanted: Wanted) -> Measurements:
    """Run `measure` on as many processes of this machine as the topology has ranks, on a `kind` of device.

    Raises:
        RaypackError: fewer GPUs than ranks, a rank that failed (its own words), or the time-out; no rank is left over.
    """
    world = topology.world
    if kind == "cuda" and torch.cuda.device_count() < world:
        raise RaypackError(f"ranks = {world}: this machine has {torch.cuda.device_count()} GPUs; ask for fewer ranks")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="raypack-calibrate-") as folder:
        pipes, processes = [], []
        try:
            for rank in range(world):
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_spawned,
                    args=(topology, rank, kind, wanted, str(Path(folder) / "store"), there),
                    daemon=True,
                )
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            return _collect(pipes, wanted.timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(10)


def _collect(pipes: list[Connection], timeout: float) -> Measurements:
    """Rank 0's answer, once every rank has answered."""
    deadline, waiting = time.monotonic() + timeout, dict(enumerate(pipes))
    first: Measurements | None = None
    while waiting:
        left = deadline - time.monotonic()
        ready = wait(list(waiting.values()), timeout=max(left, 0))
        if not ready:
            raise RaypackError(
                f"calibrate: waited timeout = {timeout:g} s for ranks {sorted(waiting)}; raise it or use fewer ranks"
            )
        failures = []
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            answer = _answer(waiting.pop(rank), rank)
            if isinstance(answer, Failure):
                failures.append(answer)
            elif rank == 0:
                first = answer
        if failures:
            raise RaypackError(f"calibrate: {min(failures).text}")
    assert first is not None
    return first


class Failure(NamedTuple):
    """`at` = monotonic seconds: a rank that fails takes others down after it, and its own words are the cause."""

    at: float
    text: str


def _answer(pipe: Connection, rank: int) -> Measurements | Failure:
    try:
        answer: Measurements | Failure = pipe.recv()
        return answer
    except EOFError:
        return Failure(time.monotonic(), f"rank {rank} died without a word (out of memory?); use fewer ranks")


def _spawned(topology: Topology, rank: int, kind: str, wanted: Wanted, store: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    torch.set_num_threads(1)
    try:
        device = torch.device("cuda", rank) if kind == "cuda" else torch.device(kind)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend_for(device),
            init_method=f"file://{store}",
            rank=rank,
            world_size=topology.world,
            timeout=timedelta(seconds=wanted.timeout),
        )
        found = measure(topology, rank, device, wanted)
        dist.destroy_process_group()
        pipe.send(found)
    except Exception as error:
        pipe.send(Failure(time.monotonic(), f"rank {rank} failed: {_one_line(error)}"))


def join_torchrun(device_asked: str, wanted: Wanted) -> tuple[int, Measurements]:
    """Run `measure` on this process, one rank of those that torchrun has started: (rank, what all ranks know).

    Raises:
        RaypackError: ranks that do not meet within the time-out, or that are not contiguous per node.
    """
    kind, local = device_kind(device_asked), int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend_for(device), timeout=timedelta(seconds=wanted.timeout))
        rank, places = dist.get_rank(), [("", 0)] * dist.get_world_size()
        # torchrun numbers its agents; host names may repeat where machines are containers.
        dist.all_gather_object(places, (os.environ.get("GROUP_RANK", "0"), local))
        return rank, measure(topology_of(places), rank, device, wanted)
    except RuntimeError as error:
        raise RaypackError(f"calibrate: {_one_line(error)}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _one_line(error: Exception) -> str:
    if isinstance(error, RaypackError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"
