"""What a round costs besides its work: training steps of 1, 2 and 4 rounds with two tokens a rank, a line through them.

The slope is `round_seconds`: kernel launches of all layers, forward and backward, gradient collection, parameter
gathers where sharded. It depends on the model, so it is measured only for a given one.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from raypack.calibrate.fit import Series
from raypack.calibrate.stopwatch import Stopwatch
from raypack.comm.groups import Groups
from raypack.comm.ledger import Ledger
from raypack.comm.wire import Wire
from raypack.config import ModelConfig, TrainSection
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block
from raypack.training.optimizer import build_optimizer
from raypack.training.parameters import build_parameters
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare

ROUNDS = (1, 2, 4)
TOKENS = 2


def measure_rounds(groups: Groups, watch: Stopwatch, model: ModelConfig, train: TrainSection) -> Series:
    """Seconds of training steps by their number of rounds, on every rank of `groups`.

    Every rank holds one sample of `TOKENS` tokens a round, so there is next to no work and no exchange.
    """
    topology, rank, device = groups.topology, groups.rank, watch.device
    parameters = build_parameters(model, train, 0, groups, device)
    trainer = Trainer(
        parameters,
        build_optimizer(parameters.masters, train),
        train,
        1,
        Wire(groups, Ledger(topology, rank)),
        groups,
        device,
    )
    seconds = []
    for count in ROUNDS:
        work = prepare(empty_plan(topology.nodes, count), topology, rank, model, _first_tokens)
        seconds.append(watch.seconds(partial(train_step, trainer, work)))
    return Series(tuple(map(float, ROUNDS)), tuple(seconds))


def empty_plan(nodes: tuple[int, ...], rounds: int) -> Plan:
    """`rounds` rounds in which each rank alone holds one sample of `TOKENS` tokens."""
    world = sum(nodes)
    alone = [Block(rank, 1) for rank in range(world)]
    return Plan(
        nodes,
        tuple(
            Round(tuple(Placement(number * world + b.first, TOKENS, b, b, TOKENS - 1) for b in alone))
            for number in range(rounds)
        ),
    )


def _first_tokens(
    samples: np.ndarray, lengths: np.ndarray, lows: np.ndarray, highs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Token 0 everywhere; a label of 0 on all but a sample's last token."""
    ends = np.repeat(lengths, highs - lows)
    count = int((highs - lows).sum())
    positions = np.concatenate([np.arange(low, high) for low, high in zip(lows, highs, strict=True)] or [np.zeros(0)])
    return np.zeros(count, dtype=np.int64), np.where(positions + 1 < ends, 0, -100).astype(np.int64)


def train_settings(device: torch.device, shard: str) -> TrainSection:
    """As a run would train on this device."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    return TrainSection.model_validate({"dtype": dtype, "shard": shard})
