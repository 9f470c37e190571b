"""RMSNorm (Zhang and Sennrich 2019) on heads.

torch's operator squares and divides half types in fp32 by itself, and is fused on GPUs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize_heads(qkv: Tensor, heads: int, kv_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm on each query and key head of [N, heads + 2 * kv_heads, D], before RoPE; values as they were."""
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    q = F.rms_norm(q, q_weight.shape, q_weight, eps)
    k = F.rms_norm(k, k_weight.shape, k_weight, eps)
    return torch.cat([q, k, v], 1)
