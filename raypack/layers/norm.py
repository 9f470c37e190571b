"""RMSNorm (Zhang and Sennrich 2019), computed in promote_types(dtype, float32)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension; dtype of x.

    torch's operator squares and divides in fp32 for half types by itself, and is fused on GPUs.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight, [width], at first one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def normalize_heads(qkv: Tensor, heads: int, kv_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm on each query and key head of [N, heads + 2 * kv_heads, D], before RoPE; values as they were."""
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    return torch.cat([rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), v], 1)
