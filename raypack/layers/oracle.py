"""What the one-rank oracles of layer kinds share: one document at a time, dense masks, loops. Slow and plain.

Nothing here shares code with the fast paths: agreement then means something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypack.config import ModelConfig


def wide(x: Tensor) -> Tensor:
    """At least fp32; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    kv_of_q: Sequence[int] | None = None,
) -> Tensor:
    """Causal softmax attention inside each document, [N, hq, D]; arguments as `kernels.attention`."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_of_q is None:
        kv_of_q = [head * kv_heads // heads for head in range(heads)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, first = [], 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
        visible = key <= query
        if window is not None:
            visible &= (query - key < window) | (key < sinks)
        document = []
        for head in range(heads):
            scores = wide(q[rows, head]) @ wide(k[rows, kv_of_q[head]]).T * scale
            weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
            document.append(weights @ wide(v[rows, kv_of_q[head]]))
        out.append(torch.stack(document, 1))
    return torch.cat(out).to(q.dtype)


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn every head of [n, heads, D]: pair (i, i + D/2) by the angle `position / base ** (2 i / D)`."""
    half = x.shape[-1] // 2
    x1, x2 = wide(x[..., :half]), wide(x[..., half:])
    rates = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    angles = (positions[:, None].double() * rates)[:, None]
    cos, sin = angles.cos().to(x1.dtype), angles.sin().to(x1.dtype)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    y = wide(x)
    return (y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps) * wide(weight)).to(x.dtype)


def split_heads(config: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, (heads + 2 * kv_heads) * D] -> q, k, v by heads."""
    heads, kv_heads = config.heads, config.kv_heads
    x = qkv.view(len(qkv), heads + 2 * kv_heads, config.head_dim)
    return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]


def softmax_layer(
    config: ModelConfig, layer: Mapping[str, Tensor], x: Tensor, window: int | None = None, sinks: int = 0
) -> Tensor:
    """Softmax attention of one document, [n, width] -> [n, heads, D], before the output projection."""
    n = len(x)
    q, k, v = split_heads(config, x @ layer["qkv.weight"].T)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.norm_eps)
        k = rms_norm(k, layer["k_norm"], config.norm_eps)
    q, k = (rope(part, torch.arange(n), config.rope_base) for part in (q, k))
    return attention(q, k, v, [n], window=window, sinks=sinks)
