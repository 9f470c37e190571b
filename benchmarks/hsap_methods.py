"""Full attention of one pack over all ranks, by hsap and by the methods it is compared with: one interface.

A method takes this rank's share of the pack's Q, K and V in its own token layout and returns the outputs in the same
layout; what it moves in between is counted by the rank's ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import packed, packed_gather, packed_ring
from raypack.comm.wire import Wire
from raypack.config import ClusterConfig, ModelConfig
from raypack.exchange.hsap.attention import hsap_attention
from raypack.layers.frame import Frame, build_frame
from raypack.layers.full.host_plan import FullPlan
from raypack.layers.projections import attend_by_heads
from raypack.plan.plan import Placement, Round
from raypack.plan.samples import Samples
from raypack.plan.topology import Block, Topology
from raypack.planning.policies import make_plan


@dataclass(frozen=True)
class Method:
    """`rows`: (document, low, high) of this rank's rows, in order. `run`: [rows, Q + K + V heads, D] -> outputs."""

    rows: tuple[tuple[int, int, int], ...]
    run: Callable[[Tensor], Tensor]


Maker = Callable[[Sequence[int], int, ModelConfig, Wire], Method]


def ring(cut: Callable[[Sequence[int], int], list[list[packed.Piece]]], attention: Callable[..., Tensor]) -> Maker:
    """A method whose tokens stay where `cut` puts them."""

    def make(lengths: Sequence[int], rank: int, model: ModelConfig, wire: Wire) -> Method:
        world = wire.ledger.topology.world
        held = cut(lengths, world)
        about = packed_ring.Ring(rank, Block(0, world), held, wire)
        return Method(tuple(held[rank]), lambda qkv: attention(qkv, model.heads, about))

    return make


Rounds = tuple[Round, ...]


def by_plan(rounds: Callable[[Sequence[int], ModelConfig, Topology], Rounds]) -> Maker:
    """A method that raypack itself runs: the full layer of each round, one after the other."""

    def make(lengths: Sequence[int], rank: int, model: ModelConfig, wire: Wire) -> Method:
        topology = wire.ledger.topology
        rows: list[tuple[int, int, int]] = []
        frames = []
        for round_ in rounds(lengths, model, topology):
            frames.append(build_frame(round_, topology, rank, model))
            segments = frames[-1].segments
            documents = frames[-1].samples[segments.placement]
            columns = (documents, segments.low, segments.high)
            rows += zip(*(column.tolist() for column in columns), strict=True)

        def run(qkv: Tensor) -> Tensor:
            parts = qkv.split([frame.rows for frame in frames])
            return torch.cat([_layer(part, frame, model, wire) for part, frame in zip(parts, frames, strict=True)])

        return Method(tuple(rows), run)

    return make


def _layer(qkv: Tensor, frame: Frame, model: ModelConfig, wire: Wire) -> Tensor:
    """As the F layer, with the kernel that all methods share."""
    plan: FullPlan = frame.plans["F"]

    def attend(call: Tensor, number: int) -> Tensor:
        description = plan.by_heads.into.calls[number]
        if description.spread:
            assert plan.hsap is not None
            return hsap_attention(call, plan.hsap, wire)
        q0, q1, k0, k1 = description.heads
        q, k, v = call.split([q1 - q0, k1 - k0, k1 - k0], 1)
        return packed.attend(q, k, v, description.lengths)

    return attend_by_heads(qkv, plan.by_heads, wire, "full", attend)


def ulysses(lengths: Sequence[int], model: ModelConfig, topology: Topology) -> Rounds:
    """Every document over all ranks by heads."""
    whole = Block(0, topology.world)
    return (Round(tuple(Placement(i, n, whole, whole, n - 1) for i, n in enumerate(lengths))),)


def hsap_whole(lengths: Sequence[int], model: ModelConfig, topology: Topology) -> Rounds:
    """Every document of the pack by hsap over all nodes; children are whole nodes, tokens about equal."""
    whole, room = Block(0, topology.world), [0] * len(topology.nodes)
    placements = []
    for i in np.argsort(-np.array(lengths), kind="stable").tolist():
        node = room.index(min(room))
        room[node] += lengths[i]
        placements.append(Placement(i, lengths[i], whole, topology.node_block(node), lengths[i] - 1, "hsap"))
    return (Round(tuple(placements)),)


def planned(cluster: ClusterConfig, network: ModelConfig) -> Callable[[Sequence[int], ModelConfig, Topology], Rounds]:
    """The planner's parents and children for the model `network`, hsap for all parents over nodes."""

    def rounds(lengths: Sequence[int], model: ModelConfig, topology: Topology) -> Rounds:
        samples = Samples.of_lengths(np.array(lengths))
        return make_plan(samples, topology, cluster, network, "joint", attention="hsap").rounds

    return rounds


def methods(cluster: ClusterConfig, network: ModelConfig) -> dict[str, Maker]:
    """By name; the first is the reference of all ratios. `cluster`, `network`: what the planner plans for."""
    return {
        "hsap, planned": by_plan(planned(cluster, network)),
        "hsap, whole pack": by_plan(hsap_whole),
        "all-gather KV": ring(packed.zigzag_pack, packed_gather.attention),
        "zig-zag ring": ring(packed.zigzag_documents, packed_ring.attention),
        "ring over everything": ring(packed.contiguous, packed_ring.attention),
        "ulysses": by_plan(ulysses),
    }


def packs(lengths: np.ndarray, tokens: int, count: int, seed: int = 0) -> list[list[int]]:
    """Packs of exactly `tokens`: documents drawn from `lengths` (clipped at a pack), the last one cut to fit."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        drawn = np.minimum(rng.choice(lengths, size=tokens // 16), tokens).tolist()
        ends = list(accumulate(drawn))
        last = next(i for i, end in enumerate(ends) if end >= tokens)
        pack = drawn[: last + 1]
        pack[-1] -= ends[last] - tokens
        found.append(pack)
    return found
