"""Seconds and bytes per unit of work that no layer kind owns: what the machines of a cluster do for a model.

Everything here is a coefficient: seconds of a token's projections, of a collective, bytes of a head. What a layer kind
adds stands in its room (`layers`), what a way of exchanging asks of ranks in its own (`exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from raypack.config import ClusterConfig, ModelConfig

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


ITEMSIZE = 2
"""Bytes of one exchanged number where nothing else is said: bf16."""


@dataclass(frozen=True)
class Passes:
    """How often each part of a layer runs in one training step, in units of its forward pass."""

    attention: int
    projections: int
    feed_forward: int
    exchange: int


PASSES = {
    "none": Passes(TRAIN_PASSES, TRAIN_PASSES, TRAIN_PASSES, 2),
    "selective": Passes(TRAIN_PASSES, TRAIN_PASSES, TRAIN_PASSES + 1, 2),
    "full": Passes(TRAIN_PASSES + 1, TRAIN_PASSES + 1, TRAIN_PASSES + 1, 3),
}
"""By a round's `recompute`: selective replays the feed-forward part, full whole layers with their exchanges."""


@dataclass(frozen=True)
class Rates:
    """What the ranks of `cluster` do for `model`; `itemsize` = bytes of one exchanged number."""

    model: ModelConfig
    cluster: ClusterConfig
    itemsize: int = ITEMSIZE

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of one rank in matrix products."""
        return self.cluster.peak_flops * self.cluster.matmul_share

    @cached_property
    def attention_rate(self) -> float:
        """FLOP/s of one rank in attention."""
        return self.cluster.peak_flops * self.cluster.attention_share

    def layer_seconds(self, recompute: str) -> float:
        """Seconds of one token's projections and feed-forward in one layer, all passes of a step."""
        each, passes = token_flops(self.model), PASSES[recompute]
        return (passes.projections * each.projections + passes.feed_forward * each.feed_forward) / self.matmul_rate

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one head of one token on the wire."""
        return self.model.head_dim * self.itemsize

    @cached_property
    def held_heads(self) -> int:
        """Q, K and V heads of one token: the unit of the second memory limit."""
        return self.model.heads + 2 * self.model.kv_heads

    @cached_property
    def scope_rates(self) -> np.ndarray:
        """Bytes/s of the four sides of an exchange: sent and received inside a node, sent and received across."""
        return np.array([*[self.cluster.intra_rate] * 2, *[self.cluster.inter_rate] * 2])

    def cap(self, recompute: str) -> int:
        """Tokens of one rank in one round; rounds that replay may have a larger cap."""
        cluster = self.cluster
        own = {"selective": cluster.rank_tokens_max_selective, "full": cluster.rank_tokens_max_full}
        return own.get(recompute, 0) or cluster.rank_tokens_max

    def latency(self, crosses: bool) -> float:
        """Seconds of one collective, without its bytes."""
        return self.cluster.inter_latency if crosses else self.cluster.intra_latency

    def least_latency(self, crosses: bool) -> float:
        """A wider component may have the latency of the other scope: a floor takes the lesser where both can be."""
        return self.latency(True) if crosses else min(self.latency(True), self.latency(False))
