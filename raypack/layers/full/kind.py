"""F, full attention: causal over the whole document, heads at the sample's parent."""

from __future__ import annotations

import numpy as np

from raypack.config import ModelConfig
from raypack.cost.flops import causal_pairs, softmax_pair_flops
from raypack.layers.full.cost import FullCosting
from raypack.layers.kind import LayerKind, Work


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
