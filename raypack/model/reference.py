"""The oracle of the decoder: one rank, one document at a time, loops. Slow and plain on purpose, with autograd; the
layers' own oracles are in their rooms.

Nothing here shares code with the fast paths: agreement then means something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypack.config import ModelConfig
from raypack.layers.kinds import kind_of
from raypack.layers.oracle import rms_norm, wide
from raypack.registry import resolve


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


def _of_layer(state: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    """Layer `i`, its attention's parameters beside the others: all names differ."""
    at = f"layers.{i}."
    return {name.removeprefix(at).removeprefix("attention."): t for name, t in state.items() if name.startswith(at)}


def hidden_states(config: ModelConfig, state: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """The whole decoder on one document, int64 [n]: [n, width] after the last norm."""
    n = len(tokens)
    x = state["embed.weight"][tokens]
    for i, letter in enumerate(config.kinds):
        layer = _of_layer(state, i)
        y = rms_norm(x, layer["attention_norm.weight"], config.norm_eps)
        y = resolve(kind_of(config, letter).oracle, {}, f"layer kind {letter}")(config, layer, y)
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
        state: `HybridModel(config).state_dict()`, or leaves that require gradients under the same names:
            `embed.weight`; `layers.{i}.` with `attention_norm.weight`, `attention.qkv.weight` (rows: Q heads, K heads,
            V heads), `attention.out.weight`, `attention.q_norm` and `attention.k_norm` where `qk_norm`, in L layers
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
