"""What every rank runs for `raypack calibrate`: timed matrix products, attention and all-to-alls, all ranks at once.

Each point is the median over repeats of the slowest rank's seconds, since a step waits for the slowest. On CPUs the
ranks share cores and caches, as they do in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from raypack.calibrate.fit import Series
from raypack.calibrate.result import Measurements, Wanted, check_equal
from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire, backend_for
from raypack.config import ModelConfig, TrainSection
from raypack.cost.rates import TRAIN_PASSES, causal_pairs
from raypack.kernels.attention import attention, select_backend
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block, Topology
from raypack.training.parameters import build_optimizer, build_parameters
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare

KIB, MIB = 1024, 1024**2
WARM_UP = 2
# Of the training steps that are timed: how many rounds they have, and tokens of each rank in a round.
ROUNDS = (1, 2, 4)
TOKENS = 2


@dataclass(frozen=True)
class Sizes:
    """What is measured on a kind of device.

    Attributes:
        matmul: sides of square products.
        attention: tokens of one causal document.
        exchange: bytes that a rank sends to others in one all-to-all, before rounding to equal parts.
        dtype: of products and attention.
    """

    matmul: tuple[int, ...]
    attention: tuple[int, ...]
    heads: int
    head_dim: int
    exchange: tuple[int, ...]
    dtype: torch.dtype


CPU_SIZES = Sizes(
    matmul=(256, 384, 512, 640, 768),
    attention=(256, 384, 512, 768, 1024),
    heads=4,
    head_dim=64,
    exchange=(16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB),
    dtype=torch.float32,
)
CUDA_SIZES = Sizes(
    matmul=(1024, 2048, 3072, 4096, 6144, 8192),
    attention=(2048, 4096, 8192, 12_288, 16_384),
    heads=16,
    head_dim=128,
    exchange=(64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    dtype=torch.bfloat16,
)


def measure(
    topology: Topology, rank: int, device: torch.device, wanted: Wanted, sizes: Sizes | None = None
) -> Measurements:
    """Measure on every rank of the default process group (one rank too); all ranks return the same figures.

    Args:
        device: of this rank; decides backend, kernel and sizes.

    Raises:
        RaypackError: nodes of unequal size.
    """
    check_equal(topology.nodes)
    sizes = sizes or (CUDA_SIZES if device.type == "cuda" else CPU_SIZES)
    groups = Groups(topology, device, wanted.timeout)
    timer = CallTimer(groups.host, device, wanted.repeats)
    node = topology.node_block(topology.node_of[rank])
    intra = inter = rounds = None
    if node.width > 1:
        intra = _exchanges(timer, groups[node], _inside(topology, rank), sizes.exchange)
    if len(topology.nodes) > 1:
        inter = _exchanges(timer, groups[groups.world_block], _outside(topology, rank), sizes.exchange)
    if wanted.model is not None:
        rounds = measure_rounds(groups, timer, wanted.model, train_settings(device, wanted.shard))
    return Measurements(
        nodes=topology.nodes,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        backend=backend_for(device),
        kernel=select_backend(device, sizes.dtype),
        launch_seconds=timer.seconds(_attention_call(sizes, 16, device)) / 2,
        matmul=_matmuls(timer, sizes, device),
        attention=_attentions(timer, sizes, device),
        intra=intra,
        inter=inter,
        rounds=rounds,
        model=wanted.model.name if wanted.model else "",
    )


def _matmuls(timer: CallTimer, sizes: Sizes, device: torch.device) -> Series:
    seconds = []
    for side in sizes.matmul:
        a = torch.randn(side, side, device=device, dtype=sizes.dtype)
        b, out = torch.randn_like(a), torch.empty_like(a)
        seconds.append(timer.seconds(partial(torch.mm, a, b, out=out)))
    return Series(tuple(2.0 * side**3 for side in sizes.matmul), tuple(seconds))


def _attentions(timer: CallTimer, sizes: Sizes, device: torch.device) -> Series:
    """Forward and backward of one causal document; FLOPs as the cost model counts them."""
    seconds = tuple(timer.seconds(_attention_call(sizes, tokens, device)) for tokens in sizes.attention)
    pair = TRAIN_PASSES * 4.0 * sizes.heads * sizes.head_dim
    return Series(tuple(pair * float(causal_pairs(tokens)) for tokens in sizes.attention), seconds)


def _attention_call(sizes: Sizes, tokens: int, device: torch.device) -> Callable[[], object]:
    shape = (tokens, sizes.heads, sizes.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=sizes.dtype).requires_grad_() for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=sizes.dtype)
    return lambda: torch.autograd.grad(attention(q, k, v, [tokens]), (q, k, v), grad)


def _inside(topology: Topology, rank: int) -> list[int]:
    """1 for each other rank of the own node, 0 for oneself; by rank of the node."""
    node = topology.node_block(topology.node_of[rank])
    return [int(other != rank) for other in range(node.first, node.end)]


def _outside(topology: Topology, rank: int) -> list[int]:
    """1 for each rank of another node, 0 on the own one; by rank of the world."""
    node = topology.node_of[rank]
    return [int(other != node) for other in topology.node_of]


def _exchanges(timer: CallTimer, group: dist.ProcessGroup, peers: Sequence[int], sizes: Sequence[int]) -> Series:
    """All-to-alls with equal parts for the `peers` and none for other members of the group."""
    amounts, seconds = [], []
    for size in sizes:
        part = max(1, size // sum(peers))
        splits = [part * peer for peer in peers]
        send = torch.ones(sum(splits), dtype=torch.uint8, device=timer.device)
        call = partial(dist.all_to_all_single, torch.empty_like(send), send, splits, splits, group=group)
        amounts.append(float(len(send)))
        seconds.append(timer.seconds(call))
    return Series(tuple(amounts), tuple(seconds))


def measure_rounds(groups: Groups, timer: CallTimer, model: ModelConfig, train: TrainSection) -> Series:
    """Seconds of training steps by their number of rounds, on every rank of `groups`.

    The slope of the line through them is `round_seconds`, what a round costs besides its work: kernel launches of all
    layers, gradient collection, parameter gathers where sharded. It depends on the model, so it is measured only for a
    given one. Every rank holds one sample of `TOKENS` tokens a round, so there is next to no work and no exchange.
    """
    topology, rank, device = groups.topology, groups.rank, timer.device
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
        seconds.append(timer.seconds(partial(train_step, trainer, work)))
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


class CallTimer:
    """Times a call on all ranks together. Every rank makes the same calls in the same order.

    Args:
        host: CPU group of all ranks; None in a world of one.
        device: what a call runs on; waited for before and after it.
        repeats: timed calls, after `WARM_UP` that are not counted.
    """

    def __init__(self, host: dist.ProcessGroup | None, device: torch.device, repeats: int) -> None:
        self.host, self.device, self.repeats = host, device, repeats

    def seconds(self, call: Callable[[], object]) -> float:
        """Median over the repeats of the slowest rank's seconds: the same on every rank."""
        for _ in range(WARM_UP):
            self._once(call)
        return statistics.median(self._once(call) for _ in range(self.repeats))

    def _once(self, call: Callable[[], object]) -> float:
        self._wait()
        if self.host is not None:
            dist.barrier(self.host)
        started = time.perf_counter()
        call()
        self._wait()
        spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        if self.host is not None:
            dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=self.host)
        return float(spent)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
