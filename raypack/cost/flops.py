"""FLOPs of a document, by layer kind: the one count behind planning, MFU and the step record.

Counted structurally (a multiply-add is 2 FLOPs), forward only; a backward pass costs twice as much. Norms, RoPE,
softmax and the embedding look-up are left out, as usual for MFU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from raypack.config import ModelConfig

TRAIN_PASSES = 3
"""Forward once and backward twice as much."""


def causal_pairs(lengths: ArrayLike) -> np.ndarray:
    """Query-key pairs of causal attention inside each document: `n (n + 1) / 2`. Integers, shape of `lengths`."""
    n = np.asarray(lengths, dtype=np.int64)
    return n * (n + 1) // 2


def window_pairs(lengths: ArrayLike, window: int, sinks: int = 0) -> np.ndarray:
    """Query-key pairs of sliding-window attention: query i sees itself and `window - 1` tokens before it.

    The first `sinks` tokens of the document are seen too, once they have left the window. Integers, shape of `lengths`.
    """
    n = np.asarray(lengths, dtype=np.int64)
    return _capped_sum(n, window) + _capped_sum(np.maximum(n - window, 0), sinks)


def _capped_sum(n: np.ndarray, cap: int) -> np.ndarray:
    """Sum of min(i, cap) for i = 1..n."""
    ramp = np.minimum(n, cap)
    return ramp * (ramp + 1) // 2 + (n - ramp) * cap


@dataclass(frozen=True)
class TokenFlops:
    """Forward FLOPs of one token in one layer (`head`: in the output head, once) and of one query-key pair.

    Attributes:
        recurrence: of an L layer besides its projections: state update and read, gates, convolution.
        chunk: what the chunked form adds to it, pairs inside chunks; no model FLOPs, since it depends on the chunk.
    """

    projections: int
    feed_forward: int
    head: int
    pair: int
    recurrence: int
    chunk: int

    @property
    def layer(self) -> int:
        return self.projections + self.feed_forward


def token_flops(model: ModelConfig) -> TokenFlops:
    """Projections Q, K, V and O; SwiGLU of the active experts (three products each) and the router; Q K and A V."""
    dim, linear = model.head_dim, 2 * model.head_dim**2 * (model.heads + model.kv_heads)
    linear += 2 * model.linear_conv * (model.heads + 2 * model.kv_heads) * dim
    if model.linear_decay == "gate":
        linear += 2 * model.linear_gate_rank * (model.width + model.kv_heads * dim)
    head_columns = 2 * model.heads + 2 * model.kv_heads
    hidden = model.ffn_width
    router = 0
    if model.experts:
        hidden = model.experts_active * model.expert_width + model.shared_expert_width
        router = 2 * model.width * model.experts
    return TokenFlops(
        projections=2 * model.width * model.head_dim * head_columns,
        feed_forward=6 * model.width * hidden + router,
        head=2 * model.width * model.vocabulary,
        pair=4 * model.heads * model.head_dim,
        recurrence=linear,
        chunk=2 * model.heads * dim * (model.linear_chunk + 1),
    )


def train_flops(model: ModelConfig, lengths: ArrayLike) -> dict[str, np.ndarray]:
    """Forward and backward FLOPs of each document by kind: full, window, linear, projections, feed_forward, head.

    Each value has the shape of `lengths` (float64). Replays are no model FLOPs and are not counted.
    """
    n = np.asarray(lengths, dtype=np.float64)
    each = token_flops(model)
    count, layers = model.kinds.count, len(model.kinds)
    window = window_pairs(lengths, model.window, model.sinks).astype(np.float64)
    return {
        "full": TRAIN_PASSES * count("F") * each.pair * causal_pairs(lengths).astype(np.float64),
        "window": TRAIN_PASSES * count("S") * each.pair * window,
        "linear": TRAIN_PASSES * count("L") * each.recurrence * n,
        "projections": TRAIN_PASSES * layers * each.projections * n,
        "feed_forward": TRAIN_PASSES * layers * each.feed_forward * n,
        "head": TRAIN_PASSES * each.head * n,
    }


def model_flops(model: ModelConfig, lengths: ArrayLike) -> float:
    """Forward and backward FLOPs of a step with documents of these lengths, output head included."""
    return float(sum(part.sum() for part in train_flops(model, lengths).values()))
