"""L, linear attention: states instead of keys, at the sample's child (LASP-2; docs/linear.md)."""

from __future__ import annotations

from raypack.config import ModelConfig
from raypack.layers.kind import LayerKind, Work, no_pairs
from raypack.layers.linear.cost import LinearCosting


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
