"""S, sliding-window attention: a query sees itself, the `window - 1` tokens before it and the document's sinks; heads
at the sample's child."""

from __future__ import annotations

import numpy as np

from raypack.config import ModelConfig
from raypack.cost.flops import softmax_pair_flops, window_pairs
from raypack.layers.kind import LayerKind, Work
from raypack.layers.window.cost import WindowCosting


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
