"""The same layer on one rank, one document, token by token: what the tests hold the fast one against."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gated_linear.kind import FLOOR
from raypack.config import ModelConfig
from raypack.layers.linear.oracle import causal_conv, feature, linear_attention
from raypack.layers.oracle import rms_norm, split_heads, wide


def gated_layer(config: ModelConfig, layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """One document, [n, width] -> [n, heads, D]."""
    n = len(x)
    qkv = x @ layer["qkv.weight"].T
    if config.linear_conv:
        qkv = causal_conv(qkv, layer["conv"], [n])
    q, k, v = split_heads(config, qkv)
    q, k = feature(q, config.linear_feature) * config.head_dim**-0.5, feature(k, config.linear_feature)
    gate = (x @ layer["gate_in.weight"].T) @ layer["gate_out.weight"].T + layer["gate_out.bias"]
    decay = torch.log(FLOOR + (1 - FLOOR) * torch.sigmoid(wide(gate))).view(n, config.kv_heads, -1)
    y = linear_attention(q, k, v, [n], decay)
    return rms_norm(y, layer["out_norm"], config.norm_eps) if config.linear_norm else y
