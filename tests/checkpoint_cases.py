"""Small trainers, plans and stores that the tests of checkpoints share."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raypack.checkpoint.addresses import open_store
from raypack.checkpoint.checkpoints import Checkpoints, load
from raypack.checkpoint.staging import tensors_of
from raypack.checkpoint.state import RunState
from raypack.checkpoint.storage import LocalStore, Store, folder_name
from raypack.config import TrainSection
from raypack.plan.plan import Placement, Plan, Round, StreamState
from raypack.plan.topology import Block
from raypack.training.parameters import build_optimizer, build_parameters
from raypack.training.replicas import check_replicas
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare
from tests.ranks import Case, full, loader, make_trainer, tiny_model

STREAM = StreamState(5, 1, 7)
WAIT = 60.0


def plan_for(world: int) -> Plan:
    """The same three samples in any world, two of them on a rank of their own."""
    last = Block(world - 1, 1)
    rounds = (
        Round((Placement(0, 30, Block(0, world), Block(0, 1), 29), Placement(1, 7, last, last, 6))),
        Round((Placement(2, 12, Block(0, world), last, 11),)),
    )
    return Plan(nodes=(world,), rounds=rounds)


def steps(trainer: Trainer, case: Case, count: int) -> list[float]:
    plan = plan_for(dist.get_world_size())
    work = prepare(plan, plan.topology, dist.get_rank(), case.model, loader(case))
    return [train_step(trainer, work).loss for _ in range(count)]


def whole(trainer: Trainer) -> dict[str, np.ndarray]:
    """Everything a checkpoint holds, unsharded, in fp64; router biases as fp32, which replicated models keep."""
    tensors = {name: full(tensor) for name, tensor in sorted(tensors_of(trainer).items())}
    return {name: t.astype(np.float32) if name.startswith("buffers.") else t for name, t in tensors.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def state_at(step: int, **changes: Any) -> RunState:
    return RunState(**{"step": step, "stream": STREAM, "model": "model", "corpus": "corpus", **changes})


def of(shard: str) -> Case:
    return Case(tiny_model(), TrainSection(dtype="float64", shard=shard, chunk_tokens=16))  # type: ignore[arg-type]


def saved_on_rank(rank: int, world: int, case: Case, root: str) -> tuple[dict[str, np.ndarray], list[float]]:
    """Save after steps 1 and 2: what a load must find, and the losses of two more steps."""
    trainer = make_trainer(case, plan_for(world).topology, poison=False)
    steps(trainer, case, 1)
    checkpoints = Checkpoints(trainer, open_store(root), keep=1)
    checkpoints.save(state_at(1))
    steps(trainer, case, 1)
    checkpoints.save(state_at(2))  # into the buffers of the first
    checkpoints.settle(WAIT)
    return whole(trainer), steps(trainer, case, 2)


def loaded_on_rank(rank: int, world: int, case: Case, address: str) -> tuple[dict[str, np.ndarray], list[float]]:
    """What a load finds, and the losses of two steps after it."""
    trainer = make_trainer(replace(case, seed=9), plan_for(world).topology, poison=False)
    load(trainer, address)
    check_replicas(trainer, 2)
    return whole(trainer), steps(trainer, case, 2)


def lone_trainer(seed: int = 0) -> Trainer:
    """A trainer in a world of one, outside any process group."""
    train, device = TrainSection(), torch.device("cpu")
    parameters = build_parameters(tiny_model(), train, seed, None, device)
    return Trainer(parameters, build_optimizer(parameters.masters, train), train, 9, None, None, device)  # type: ignore[arg-type]


def written(address: str | Path, *at: int, keep: int = 9) -> list[str]:
    """Addresses of checkpoints of a lone trainer after the steps `at`."""
    store = open_store(address)
    checkpoints = Checkpoints(lone_trainer(), store, keep)
    for step in at:
        checkpoints.save(state_at(step))
        checkpoints.settle(WAIT)
    return [store.address_of(folder_name(step)) for step in at]


class HeldStore(LocalStore):
    """Does not begin to write before `go` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()

    def prepare(self, name: str) -> None:
        if not self.go.wait(WAIT):
            raise OSError("held for too long")
        super().prepare(name)


def names(store: Store) -> list[str]:
    return sorted(store.listed())
