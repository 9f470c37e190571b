"""Counts of FLOPs that no layer kind owns: query-key pairs of a document, and what every layer does to a token.

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
    """Forward FLOPs of one token in one layer of any kind; `head`: in the output head, once."""

    projections: int
    feed_forward: int
    head: int


def token_flops(model: ModelConfig) -> TokenFlops:
    """Projections Q, K, V and O; SwiGLU of the active experts (three products each) and the router."""
    hidden, router = model.ffn_width, 0
    if model.experts:
        hidden = model.experts_active * model.expert_width + model.shared_expert_width
        router = 2 * model.width * model.experts
    return TokenFlops(
        projections=2 * model.width * model.head_dim * (2 * model.heads + 2 * model.kv_heads),
        feed_forward=6 * model.width * hidden + router,
        head=2 * model.width * model.vocabulary,
    )


def softmax_pair_flops(model: ModelConfig) -> int:
    """Forward FLOPs of one query-key pair over all heads: Q K and A V."""
    return 4 * model.heads * model.head_dim
