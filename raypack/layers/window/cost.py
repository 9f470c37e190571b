"""What sliding-window attention asks of ranks: heads exchanged inside the child."""

from __future__ import annotations

from raypack.cost.rates import PASSES
from raypack.exchange.asks import Addition, Ask, Floor
from raypack.exchange.cohorts import Shards
from raypack.exchange.heads import cost as heads
from raypack.layers.kind import LayerCost
from raypack.plan.topology import Block, Topology


class WindowCosting:
    """`layers.kind.Costing` of attention by heads at the child."""

    def ask(self, layer: LayerCost, shards: Shards, recompute: str) -> Ask:
        found = heads.ask(shards, shards.streams, shards.of_streams(layer.pairs(shards.rows.length)), layer.rates)
        late = heads.latency(shards.streams, shards.where, layer.rates)
        found.latency[:] += late * heads.COLLECTIVES * PASSES[recompute].exchange
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
