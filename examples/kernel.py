"""An attention kernel of one's own: torch's fused attention, one document at a time.

raypack train --train.kernel kernel:by_document        # from this directory, or with it on PYTHONPATH

raypack checks the arguments, copies KV heads where a rank's heads need it, and does the exchange between ranks; what is
left is causal attention inside each document of a packed stream (`raypack.kernels.attention.Kernel`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raypack.kernels.packing import Packing


def by_document(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, keys: Packing, window: int | None, sinks: int, scale: float
) -> Tensor:
    """[N, hq, D], [M, hkv, D] and [M, hkv, D] to [N, hq, D]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, tokens, D]
    queries = q.split(list(packing.lengths), dim=1)
    seen = zip(k.split(list(keys.lengths), dim=1), v.split(list(keys.lengths), dim=1), strict=True)
    outputs = []
    for own, (key, value) in zip(queries, seen, strict=True):
        mask = visible(own.shape[1], key.shape[1], window, sinks, q.device)
        outputs.append(F.scaled_dot_product_attention(own, key, value, attn_mask=mask, scale=scale, enable_gqa=True))
    return torch.cat(outputs, dim=1).transpose(0, 1)


def visible(queries: int, keys: int, window: int | None, sinks: int, device: torch.device) -> Tensor:
    """Which key each query sees: bool [queries, keys]. The last query is the last key's token."""
    key = torch.arange(keys, device=device)
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    before = key <= query
    return before if window is None else before & ((query - key < window) | (key < sinks))
