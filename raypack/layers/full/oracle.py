"""The oracle of F layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from raypack.config import ModelConfig
from raypack.layers.oracle import softmax_layer


def full_attention(config: ModelConfig, layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """One document, [n, width] -> [n, heads, D]."""
    return softmax_layer(config, layer, x)
