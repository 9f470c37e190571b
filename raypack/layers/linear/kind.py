"""L, linear attention: states instead of keys, at the sample's child (LASP-2; docs/linear.md)."""

from __future__ import annotations

from raypack.config import ModelConfig
from raypack.cost.rates import PASSES
from raypack.exchange.asks import Addition, Ask, Floor
from raypack.exchange.cohorts import Shards
from raypack.exchange.lasp2 import cost as lasp2
from raypack.layers.kind import LayerCost, LayerKind, Work, no_pairs
from raypack.plan.topology import Block, Topology


class LinearCosting:
    """`layers.kind.Costing` of linear attention at the child; tokens stay where they are."""

    def slot_bytes(self, layer: LayerCost, recompute: str) -> int:
        """Bytes that one slot sends to one other rank in a step: states (and gates) forward and in each replay,
        gradients of states backward; never below fp32."""
        model = layer.rates.model
        state = model.kv_heads * model.head_dim**2
        gates = model.kv_heads * model.head_dim if model.linear_decay == "gate" else 0
        forwards = PASSES[recompute].exchange - 1
        return max(4, layer.rates.itemsize) * (forwards * (state + gates) + state)

    def ask(self, layer: LayerCost, shards: Shards, recompute: str) -> Ask:
        calls = PASSES[recompute].exchange * self.calls(layer)
        return lasp2.ask(shards, self.slot_bytes(layer, recompute), calls, layer.rates)

    def addition(
        self, layer: LayerCost, topology: Topology, parent: Block, child: Block, attention: str
    ) -> Addition | None:
        return None

    def floor(
        self, layer: LayerCost, topology: Topology, parent: Block, child: Block, attention: str, recompute: str
    ) -> tuple[Floor, float]:
        if child.width == 1:
            return Floor(0.0, 0.0), 0.0
        seconds = lasp2.least_seconds(topology, self.slot_bytes(layer, recompute), layer.rates, child)
        return Floor(0.0, 0.0, calls=self.calls(layer)), seconds

    def calls(self, layer: LayerCost) -> int:
        """The gather of states, and the convolution's halo."""
        return 1 + (layer.rates.model.linear_conv > 0)


def _work(model: ModelConfig) -> Work:
    """State update and read, gates, convolution; the pairs inside chunks are the implementation's, not the model's."""
    dim = model.head_dim
    token = 2 * dim**2 * (model.heads + model.kv_heads)
    token += 2 * model.linear_conv * (model.heads + 2 * model.kv_heads) * dim
    if model.linear_decay == "gate":
        token += 2 * model.linear_gate_rank * (model.width + model.kv_heads * dim)
    return Work(token=token, overhead=2 * model.heads * dim * (model.linear_chunk + 1))


LINEAR = LayerKind(
    letter="L",
    name="linear",
    at="child",
    site="",
    module="raypack.layers.linear.module:LinearAttention",
    oracle="raypack.layers.linear.oracle:linear_layer",
    host_plan="raypack.layers.linear.host_plan:plan_linear",
    work=_work,
    pairs=no_pairs,
    costing=LinearCosting(),
)
