"""F, full attention: causal over the whole document, heads at the sample's parent."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from raypack.config import ModelConfig
from raypack.cost.rates import Rates, causal_pairs, softmax_pair_flops
from raypack.exchange.asks import Addition, Ask, Floor
from raypack.exchange.cohorts import Shards
from raypack.exchange.gathered import cost as gathered
from raypack.exchange.heads import cost as heads
from raypack.exchange.hsap import cost as hsap
from raypack.layers.kind import LayerCost, LayerKind, Work
from raypack.plan.names import HSAP, KV_GATHER
from raypack.plan.topology import Block, Topology


class FullCosting:
    """`layers.kind.Costing` of full attention at the parent."""

    def ask(self, layer: LayerCost, shards: Shards, recompute: str) -> Ask:
        cohorts, where, rates = shards.cohorts, shards.where, layer.rates
        stay = (cohorts.attention == KV_GATHER) & (cohorts.child_width > 1)
        last = cohorts.parent_first + cohorts.parent_width - 1
        across = (cohorts.attention == HSAP) & (where.node[cohorts.parent_first] != where.node[last])
        by_heads, pairs = ~stay & ~across, shards.of_cohorts(layer.pairs(shards.rows.length))
        found = heads.ask(shards, cohorts.select(by_heads), pairs[by_heads], rates)
        if across.any():
            found += hsap.ask(shards, cohorts.select(across), rates, recompute, layer.attention_seconds(recompute))
        if stay.any():
            found += gathered.ask(shards, cohorts.select(stay), rates, recompute)
        found.latency[:] += heads.latency(cohorts.select(~stay), where, rates, recompute)
        return found

    def addition(
        self, layer: LayerCost, topology: Topology, parent: Block, child: Block, attention: str
    ) -> Addition | None:
        way = self.way(topology, parent, child, attention)
        return way.addition(topology, layer.rates, parent, child)

    def floor(
        self, layer: LayerCost, topology: Topology, parent: Block, child: Block, attention: str, recompute: str
    ) -> tuple[Floor, float]:
        way = self.way(topology, parent, child, attention)
        return way.floor(topology, layer.rates, parent, child), 0.0

    def calls(self, layer: LayerCost) -> int:
        return 0

    @staticmethod
    def way(topology: Topology, parent: Block, child: Block, attention: str) -> ModuleType:
        """The room of `exchange` that a placement's attention comes down to."""
        if attention == "kv_gather" and parent == child and parent.width > 1:
            return gathered
        if attention == "hsap" and not topology.in_one_node(parent):
            return hsap
        return heads


def shares(rates: Rates, attention: str, width: int) -> np.ndarray:
    """Part of a sample's pairs that each rank of its parent computes, for pictures: float64 [width]."""
    if attention == "kv_gather" and width > 1:
        return gathered.shares(width)
    return heads.weights_of(rates, width).share


def _work(model: ModelConfig) -> Work:
    return Work(pair=softmax_pair_flops(model))


def _pairs(model: ModelConfig, lengths: np.ndarray) -> np.ndarray:
    return causal_pairs(lengths)


FULL = LayerKind(
    letter="F",
    name="full",
    at="parent",
    site="full",
    module="raypack.layers.full.module:FullAttention",
    oracle="raypack.layers.full.oracle:full_attention",
    host_plan="raypack.layers.full.host_plan:plan_full",
    work=_work,
    pairs=_pairs,
    costing=FullCosting(),
)
