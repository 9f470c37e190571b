"""The oracle of L layers: token by token, state by state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypack.config import ModelConfig
from raypack.layers.oracle import rms_norm, split_heads, wide


def linear_layer(config: ModelConfig, layer: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """L attention of one document: [n, heads, D]."""
    n, kv_heads = len(y), config.kv_heads
    qkv, decay = y @ layer["qkv.weight"].T, None
    if config.linear_conv:
        qkv = causal_conv(qkv, layer["conv"], [n])
    q, k, v = split_heads(config, qkv)
    q, k = feature(q, config.linear_feature) * config.head_dim**-0.5, feature(k, config.linear_feature)
    if config.linear_decay == "gate":
        gate = (y @ layer["gate_in.weight"].T) @ layer["gate_out.weight"].T + layer["gate_out.bias"]
        decay = (torch.sigmoid(wide(gate)) ** (1 / 16)).log().view(n, kv_heads, -1)
    elif config.linear_decay == "head":
        edges = torch.logspace(-5, -9, kv_heads, base=2, dtype=torch.float64)
        decay = torch.log(1 - edges).to(wide(y).dtype)
    y = linear_attention(q, k, v, [n], decay)
    return rms_norm(y, layer["out_norm"], config.norm_eps) if config.linear_norm else y


def feature(x: Tensor, name: str) -> Tensor:
    """The feature map of linear attention."""
    maps = {
        "none": lambda x: x,
        "relu": lambda x: x * (x > 0),
        "elu": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
        "silu": lambda x: x * torch.sigmoid(x),
    }
    return maps[name](x)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], log_decay: Tensor | None = None
) -> Tensor:
    """`S_t = exp(g_t) S_{t-1} + k_t v_t^T`, `o_t = q_t S_t`, token by token, from zero at each document's start.

    q [n, H, D], k and v [n, K, D]; query head i reads KV head `i // (H / K)`. `log_decay`: None, [K] or [n, K, D].
    """
    group, out, t = q.shape[1] // k.shape[1], [], 0
    for length in lengths:
        state = wide(k).new_zeros(k.shape[1], k.shape[2], v.shape[2])
        for _ in range(length):
            if log_decay is not None:
                g = log_decay[:, None] if log_decay.dim() == 1 else log_decay[t]
                state = state * wide(g).exp()[:, :, None]
            state = state + wide(k[t])[:, :, None] * wide(v[t])[:, None, :]
            out.append(torch.stack([wide(q[t, i]) @ state[i // group] for i in range(q.shape[1])]))
            t += 1
    return torch.stack(out).to(q.dtype) if out else q


def causal_conv(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """`y_t = sum_w weight[:, W - 1 - w] * x_{t - w}` over the tokens of the same document; x [n, C], weight [C, W]."""
    taps, rows, first = weight.shape[1], [], 0
    for length in lengths:
        for t in range(length):
            seen = [x[first + t - w] * weight[:, taps - 1 - w] for w in range(min(taps, t + 1))]
            rows.append(sum(seen[1:], start=seen[0]))
        first += length
    return torch.stack(rows) if rows else x
