"""The oracles: one rank, one document at a time, dense masks, loops. Slow and plain on purpose, with autograd.

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


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [n, width], gate_up [2 * hidden, width] (gate rows first), down [width, hidden]."""
    hidden = x @ gate_up.T
    gate, up = hidden[:, : hidden.shape[1] // 2], hidden[:, hidden.shape[1] // 2 :]
    return (gate * torch.sigmoid(gate) * up) @ down.T


def moe(
    x: Tensor,
    state: Mapping[str, Tensor],
    active: int,
    experts: Tensor | None = None,
    prefix: str = "",
) -> tuple[Tensor, Tensor]:
    """Token by token. `state` holds the parameters of `MoE` under `prefix`; `experts` [n, active] replays a choice.

    Returns [n, width] and the choice, int64 [n, active].
    """
    router, gate_up, down = (state[prefix + name] for name in ("router.weight", "gate_up", "down"))
    chosen, rows = [], []
    for i in range(x.shape[0]):
        scores = torch.sigmoid(wide(x[i]) @ wide(router).T)
        if experts is None:
            ranking = (scores + state[prefix + "bias"]).tolist()
            mine = sorted(range(len(ranking)), key=lambda e: (-ranking[e], e))[:active]
        else:
            mine = experts[i].tolist()
        total = sum(scores[e] for e in mine)
        outputs = [scores[e] / total * wide(swiglu(x[i : i + 1], gate_up[e], down[e])[0]) for e in mine]
        chosen.append(mine)
        rows.append(torch.stack(outputs).sum(0).to(x.dtype))
    y = torch.stack(rows) if rows else x * 0
    if prefix + "shared.down.weight" in state:
        y = y + swiglu(x, state[prefix + "shared.gate_up.weight"], state[prefix + "shared.down.weight"])
    return y, torch.tensor(chosen, dtype=torch.int64).view(-1, active)


def cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Summed over the labels other than -100; all logits at once."""
    logits = wide(x) @ wide(weight).T
    losses = [
        torch.logsumexp(row, 0) - row[label]
        for row, label in zip(logits, labels.tolist(), strict=True)
        if label != -100
    ]
    return sum(losses, start=logits.sum() * 0)


def _split_heads(config: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, (heads + 2 * kv_heads) * D] -> q, k, v by heads."""
    heads, kv_heads = config.heads, config.kv_heads
    x = qkv.view(len(qkv), heads + 2 * kv_heads, config.head_dim)
    return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]


def _softmax(config: ModelConfig, layer: Mapping[str, Tensor], y: Tensor, kind: str) -> Tensor:
    """F and S attention of one document: [n, heads, D]."""
    n = len(y)
    q, k, v = _split_heads(config, y @ layer["qkv.weight"].T)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.norm_eps)
        k = rms_norm(k, layer["k_norm"], config.norm_eps)
    q, k = (rope(part, torch.arange(n), config.rope_base) for part in (q, k))
    return attention(q, k, v, [n], window=config.window if kind == "S" else None, sinks=config.sinks)


def _linear(config: ModelConfig, layer: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """L attention of one document: [n, heads, D]."""
    n, kv_heads = len(y), config.kv_heads
    qkv, decay = y @ layer["qkv.weight"].T, None
    if config.linear_conv:
        qkv = causal_conv(qkv, layer["conv"], [n])
    q, k, v = _split_heads(config, qkv)
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


def _of_layer(state: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    """Layer `i`, its attention's parameters beside the others: all names differ."""
    at = f"layers.{i}."
    return {name.removeprefix(at).removeprefix("attention."): t for name, t in state.items() if name.startswith(at)}


def hidden_states(config: ModelConfig, state: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """The whole decoder on one document, int64 [n]: [n, width] after the last norm."""
    n = len(tokens)
    x = state["embed.weight"][tokens]
    for i, kind in enumerate(config.kinds):
        layer = _of_layer(state, i)
        y = rms_norm(x, layer["attention_norm.weight"], config.norm_eps)
        y = _linear(config, layer, y) if kind == "L" else _softmax(config, layer, y, kind)
        x = x + y.reshape(n, -1) @ layer["out.weight"].T
        y = rms_norm(x, layer["ffn_norm.weight"], config.norm_eps)
        if config.experts:
            x = x + moe(y, layer, config.experts_active, prefix="ffn.")[0]
        else:
            x = x + swiglu(y, layer["ffn.gate_up.weight"], layer["ffn.down.weight"])
    return rms_norm(x, state["norm.weight"], config.norm_eps)


def reference_loss(
    config: ModelConfig,
    state: Mapping[str, Tensor],
    documents: Sequence[Tensor | Sequence[int]],
    labels: Sequence[Tensor | Sequence[int]],
) -> Tensor:
    """Summed token loss of a complete decoder, one document after the other.

    Args:
        config: of the model.
        state: `HybridModel(config).state_dict()`, or leaves that require gradients under the same names: `embed.weight`;
            `layers.{i}.` with `attention_norm.weight`, `attention.qkv.weight` (rows: Q heads, K heads, V heads),
            `attention.out.weight`, `attention.q_norm` and `attention.k_norm` where `qk_norm`, in L layers
            `attention.conv`, `attention.out_norm`, `attention.gate_in.weight`, `attention.gate_out.weight` and
            `attention.gate_out.bias` where the model has them, `ffn_norm.weight`, `ffn.` of `SwiGLU` or `MoE`;
            `norm.weight`; `head.weight` unless tied.
        documents: token ids of each.
        labels: of each token; -100 = none.

    Returns:
        0-dim, at least fp32.
    """
    head = state["embed.weight"] if config.tied_head else state["head.weight"]
    losses = [
        cross_entropy(hidden_states(config, state, torch.as_tensor(tokens)), head, torch.as_tensor(label))
        for tokens, label in zip(documents, labels, strict=True)
    ]
    return sum(losses, start=wide(head).sum() * 0)


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
