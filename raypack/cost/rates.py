"""Seconds and bytes per unit of work that no layer kind owns: what the machines of a cluster do for a model.

Everything here is a coefficient: seconds of a token's projections, of a collective, bytes of a head. What a layer kind
adds stands in its room (`layers`), what a way of exchanging asks of ranks in its own (`exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypack.config import ClusterConfig, ModelConfig
from raypack.cost.flops import TRAIN_PASSES, token_flops

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
