"""S, sliding-window attention: a query sees itself, the `window - 1` tokens before it and the document's sinks; heads
at the sample's child."""

from __future__ import annotations

import numpy as np

from raypack.config import ModelConfig
from raypack.cost.rates import softmax_pair_flops, window_pairs
from raypack.exchange.asks import Addition, Ask, Floor
from raypack.exchange.cohorts import Shards
from raypack.exchange.heads import cost as heads
from raypack.layers.kind import LayerCost, LayerKind, Work
from raypack.plan.topology import Block, Topology


class WindowCosting:
    """`layers.kind.Costing` of attention by heads at the child."""

    def ask(self, layer: LayerCost, shards: Shards, recompute: str) -> Ask:
        found = heads.ask(shards, shards.streams, shards.of_streams(layer.pairs(shards.rows.length)), layer.rates)
        found.latency[:] += heads.latency(shards.streams, shards.where, layer.rates, recompute)
        return found

    def addition(
        self, layer: LayerCost, topology: Topology, parent: Block, child: Block, attention: str
    ) -> Addition | None:
        return heads.addition(topology, layer.rates, child, child)

    def floor(
        self, layer: LayerCost, topology: Topology, parent: Block, child: Block, attention: str, recompute: str
    ) -> tuple[Floor, float]:
        return heads.floor(topology, layer.rates, child, child), 0.0

    def calls(self, layer: LayerCost) -> int:
        return heads.COLLECTIVES


def _work(model: ModelConfig) -> Work:
    return Work(pair=softmax_pair_flops(model))


def _pairs(model: ModelConfig, lengths: np.ndarray) -> np.ndarray:
    return window_pairs(lengths, model.window, model.sinks)


WINDOW = LayerKind(
    letter="S",
    name="sparse",
    at="child",
    site="sparse",
    module="raypack.layers.window.module:WindowAttention",
    oracle="raypack.layers.window.oracle:window_attention",
    host_plan="raypack.layers.window.host_plan:plan_window",
    work=_work,
    pairs=_pairs,
    costing=WindowCosting(),
)
