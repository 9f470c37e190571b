"""What a checkpoint costs a run: how long training stands still, how long the write and a restore take.

The model of run preset `1f3s_local` on 8 ranks, seen as 2 nodes of 4, with parameters replicated and sharded, on this
machine's disk (files are synced); then models of 4 and 16 times its parameters, without steps. A figure is the median
over repeats of the slowest rank. `beside`: `Checkpoints.save` copies and returns, the write goes on during the next
step, whose time is shown too. `still`: the loop stands still until the checkpoint is complete. `compared`: the digest
of weights that are on every rank, which the loop takes before either.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks.random_rows import random_rows
from raypack.checkpoint.addresses import open_store
from raypack.checkpoint.checkpoints import Checkpoints, load
from raypack.checkpoint.state import RunState
from raypack.checkpoint.storage import folder_name
from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import ModelConfig, TrainSection, build, preset_or_file
from raypack.plan.plan import Placement, Plan, Round, StreamState
from raypack.plan.topology import Block, Topology
from raypack.training.parameters import build_optimizer, build_parameters
from raypack.training.replicas import check_replicas
from raypack.training.step import Trainer, train_step
from raypack.training.work import StepWork, prepare

RUN = "1f3s_local"
TOPOLOGY = Topology((4, 4))
SAMPLES_A_RANK, TOKENS = 6, 512  # 24,576 tokens a step
SCALES = (1, 2, 4)  # of every width: parameters grow with its square
TIMEOUT_SECONDS = 900.0

Seconds = dict[str, list[float]]


def main(quick: bool) -> None:
    scales, repeats = (SCALES[:1], 1) if quick else (SCALES, 5)
    found = {(shard, scale): _measured(shard, scale, repeats) for shard in ("none", "world") for scale in scales}
    console = Console()
    console.print(_stalls({shard: figures for (shard, scale), figures in found.items() if scale == 1}))
    console.print(_sizes(found))


def _stalls(found: dict[str, dict[str, float]]) -> Table:
    table = Table(title="Local default model, 8 ranks: a step and the checkpoint after it, ms")
    names = ("shard", "step", "stall beside", "of a step", "stall still", "of a step",
             "next step", "compared")  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "shard" else "right")
    for shard, each in found.items():
        step = each["step"]
        table.add_row(
            shard, f"{step * 1e3:,.0f}", f"{each['beside'] * 1e3:,.1f}", f"{each['beside'] / step:.2%}",
            f"{each['still'] * 1e3:,.1f}", f"{each['still'] / step:.2%}", f"{each['next step'] * 1e3:,.0f}",
            f"{each['compared'] * 1e3:,.1f}",
        )  # fmt: skip
    return table


def _sizes(found: dict[tuple[str, int], dict[str, float]]) -> Table:
    table = Table(title="How save and restore grow, 8 ranks, ms")
    for name in ("shard", "parameters", "MB written", "stall beside", "save complete", "restore"):
        table.add_column(name, justify="left" if name == "shard" else "right")
    for (shard, _), each in found.items():
        times = (f"{each[name] * 1e3:,.1f}" for name in ("beside", "still", "restore"))
        table.add_row(shard, f"{each['parameters']:,.0f}", f"{each['bytes'] / 1e6:,.1f}", *times)
    return table


def _measured(shard: str, scale: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="raypack-checkpoint-") as folder:
        queue = mp.get_context("spawn").Queue()
        arguments = (folder, shard, scale, repeats, queue)
        processes = mp.spawn(_rank, args=arguments, nprocs=TOPOLOGY.world, join=False)
        figures = queue.get(timeout=TIMEOUT_SECONDS)
        processes.join()
        return figures


def _rank(rank: int, folder: str, shard: str, scale: int, repeats: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TOPOLOGY.world,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )  # fmt: skip
    model = _model(scale)
    trainer = _trainer(model, shard, rank)
    seconds: Seconds = {}
    work = _work(model, rank) if scale == 1 else None
    root = Path(folder) / "checkpoints"
    _run(trainer, work, Checkpoints(trainer, open_store(root), keep=1), root, repeats, seconds)
    figures = _slowest(seconds)
    if rank == 0:
        figures["parameters"] = sum(p.numel() for p in trainer.parameters.masters.values())
        figures["bytes"] = sum(RunState.read(root / folder_name(2 * repeats + 1)).files.values())
        queue.put(figures)
    dist.barrier()
    dist.destroy_process_group()


def _run(
    trainer: Trainer, work: StepWork | None, checkpoints: Checkpoints, root: Path, repeats: int, seconds: Seconds
) -> None:
    """All that is timed. The first save makes the buffers, the first step warms up: neither counts."""

    def timed(name: str, action: Callable[[], Any]) -> None:
        dist.barrier()
        started = time.perf_counter()
        action()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    def save(number: int, *, wait: bool) -> None:
        checkpoints.save(RunState(number, StreamState(0, 0, 0), "", ""))
        if wait:
            checkpoints.settle(TIMEOUT_SECONDS)

    def step() -> None:
        if work is not None:
            train_step(trainer, work)

    def repeat(number: int) -> None:
        timed("step", step)
        timed("compared", lambda: check_replicas(trainer, number))
        timed("beside", lambda: save(number, wait=False))
        timed("next step", step)
        checkpoints.settle(TIMEOUT_SECONDS)
        timed("still", lambda: save(number + 1, wait=True))
        timed("restore", lambda: load(trainer, root / folder_name(number + 1)))

    step()
    save(1, wait=True)
    for i in range(repeats):
        repeat(2 + 2 * i)


def _slowest(seconds: Seconds) -> dict[str, float]:
    every: list[Any] = [None] * TOPOLOGY.world
    dist.all_gather_object(every, seconds)
    return {name: statistics.median(np.max([of_rank[name] for of_rank in every], axis=0).tolist()) for name in seconds}


def _model(scale: int) -> ModelConfig:
    given = preset_or_file("runs", RUN)["model"]
    wide = {name: given[name] * scale for name in ("width", "head_dim", "expert_width", "shared_expert_width")}
    return build(ModelConfig, {**given, **wide}, "model")


def _trainer(model: ModelConfig, shard: str, rank: int) -> Trainer:
    train, device = build(TrainSection, {"shard": shard}, "train"), torch.device("cpu")
    groups = Groups(TOPOLOGY, device, TIMEOUT_SECONDS)
    parameters = build_parameters(model, train, 0, groups, device)
    optimizer = build_optimizer(parameters.masters, train)
    return Trainer(parameters, optimizer, train, 1000, Wire(groups, Ledger(TOPOLOGY, rank)), groups, device)


def _work(model: ModelConfig, rank: int) -> StepWork:
    """A step of short documents, each on one rank, and a parent of all ranks for one in `SAMPLES_A_RANK`."""
    world = TOPOLOGY.world
    placements = []
    for sample in range(world * SAMPLES_A_RANK):
        child = Block(sample % world, 1)
        parent = Block(0, world) if sample < world else child
        placements.append(Placement(sample, TOKENS, parent, child, TOKENS - 1))
    plan = Plan(nodes=TOPOLOGY.nodes, rounds=(Round(tuple(placements)),))

    def rows(samples: Any, lengths: Any, lows: Any, highs: Any) -> tuple[np.ndarray, np.ndarray]:
        return random_rows(lengths, lows, highs, model.vocabulary, seed=rank)

    return prepare(plan, TOPOLOGY, rank, model, rows)


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
