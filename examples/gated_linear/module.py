"""The layer: raypack's linear attention with another decay."""

from __future__ import annotations

import torch
from torch import Tensor

from gated_linear.kind import FLOOR, gated
from raypack.config import ModelConfig
from raypack.layers.linear.module import LinearAttention


class GatedLinear(LinearAttention):
    """Decay of a token and channel: `FLOOR + (1 - FLOOR) * sigmoid(gate)`."""

    def __init__(self, config: ModelConfig, letter: str) -> None:
        super().__init__(gated(config), letter)

    def log_decay(self, x: Tensor, wide: torch.dtype) -> Tensor:
        """[rows, width] -> [rows, KV heads, D]."""
        gate = torch.sigmoid(self.gate_out(self.gate_in(x)).to(wide))
        return torch.log(FLOOR + (1 - FLOOR) * gate).view(len(x), self.config.kv_heads, self.config.head_dim)
