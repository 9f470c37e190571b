"""Seconds, bytes and memory per unit of work: the cost model of planner, simulator and summaries (docs/planning.md).

Everything here is a coefficient: seconds of one rank for one query-key pair of one head, for one token, for one
collective. `load` applies them to a round, `shapes` to single samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypack.config import ClusterConfig, ModelConfig
from raypack.cost.flops import TRAIN_PASSES, causal_pairs, token_flops, window_pairs
from raypack.plan.heads import head_share

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
class HeadWeights:
    """What the ranks of a block of some width hold of one sample, by index in the block.

    Attributes:
        queries: int64 [width], query heads.
        copied: int64 [width], K and V heads together; KV heads that several ranks use are counted on each.
        share: float64 [width], part of the sample's attention pairs x heads that the rank computes.
    """

    queries: np.ndarray
    copied: np.ndarray
    share: np.ndarray

    @property
    def into(self) -> np.ndarray:
        """Heads of Q, K and V that the rank receives per token."""
        return self.queries + self.copied


@dataclass(frozen=True)
class Costs:
    """The cost model of `model` on `cluster`; `itemsize` = bytes of one exchanged number."""

    model: ModelConfig
    cluster: ClusterConfig
    itemsize: int = ITEMSIZE

    @cached_property
    def full_layers(self) -> int:
        return self.model.kinds.count("F")

    @cached_property
    def sparse_layers(self) -> int:
        return self.model.kinds.count("S")

    @cached_property
    def linear_layers(self) -> int:
        return self.model.kinds.count("L")

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of one rank in matrix products."""
        return self.cluster.peak_flops * self.cluster.matmul_share

    @cached_property
    def pair_seconds(self) -> float:
        """Forward seconds of one query-key pair over all heads, in one layer, on one rank."""
        return token_flops(self.model).pair / (self.cluster.peak_flops * self.cluster.attention_share)

    def layer_seconds(self, recompute: str) -> float:
        """Seconds of one token's projections and feed-forward in one layer, all passes of a step."""
        each, passes = token_flops(self.model), PASSES[recompute]
        return (passes.projections * each.projections + passes.feed_forward * each.feed_forward) / self.matmul_rate

    def recurrence_seconds(self, recompute: str) -> float:
        """Seconds of one token in an L layer besides projections and feed-forward, all passes of a step."""
        each = token_flops(self.model)
        return PASSES[recompute].attention * (each.recurrence + each.chunk) / self.matmul_rate

    def token_seconds(self, recompute: str) -> float:
        """Seconds of one token in all layers but for attention, all passes of a step."""
        every = len(self.model.kinds) * self.layer_seconds(recompute)
        return every + self.linear_layers * self.recurrence_seconds(recompute)

    def state_bytes(self, recompute: str) -> int:
        """Bytes that one slot of an L layer sends to one other rank in a step: states (and gates) forward and in each
        replay, gradients of states backward; never below fp32."""
        model = self.model
        state = model.kv_heads * model.head_dim**2
        gates = model.kv_heads * model.head_dim if model.linear_decay == "gate" else 0
        forwards = PASSES[recompute].exchange - 1
        return max(4, self.itemsize) * (forwards * (state + gates) + state)

    @cached_property
    def state_calls(self) -> int:
        """Collectives of an L layer and direction: the gather of states, and the convolution's halo."""
        return 1 + (self.model.linear_conv > 0)

    def attention_seconds(self, recompute: str) -> float:
        """Seconds of one query-key pair over all heads in one layer, all passes of a step."""
        return PASSES[recompute].attention * self.pair_seconds

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one head of one token on the wire."""
        return self.model.head_dim * self.itemsize

    @cached_property
    def held_heads(self) -> int:
        """Q, K and V heads of one token: the unit of the second memory limit."""
        return self.model.heads + 2 * self.model.kv_heads

    def cap(self, recompute: str) -> int:
        """Tokens of one rank in one round; rounds that replay may have a larger cap."""
        cluster = self.cluster
        own = {"selective": cluster.rank_tokens_max_selective, "full": cluster.rank_tokens_max_full}
        return own.get(recompute, 0) or cluster.rank_tokens_max

    def latency(self, crosses: bool) -> float:
        """Seconds of one collective, without its bytes."""
        return self.cluster.inter_latency if crosses else self.cluster.intra_latency

    @cached_property
    def _weights(self) -> dict[tuple[str, int], HeadWeights]:
        return {}

    def weights(self, attention: str, width: int) -> HeadWeights:
        """Heads by rank of a block of `width`.

        `ulysses` splits heads evenly. `kv_gather` (LASP-2H) gives every rank all K and V and leaves queries where they
        are: of c ranks that hold one document, number i computes (2 i + 1) / c^2 of the causal pairs.
        """
        key = (attention, width)
        if key not in self._weights:
            self._weights[key] = self._head_weights(attention, width)
        return self._weights[key]

    def _head_weights(self, attention: str, width: int) -> HeadWeights:
        if attention == "kv_gather" and width > 1:
            copied = np.full(width, 2 * self.model.kv_heads, dtype=np.int64)
            share = (2 * np.arange(width) + 1) / width**2
            return HeadWeights(np.zeros(width, dtype=np.int64), copied, share)
        table = np.array(head_share(self.model.heads, self.model.kv_heads, width), dtype=np.int64)
        queries = table[:, 1] - table[:, 0]
        return HeadWeights(queries, 2 * (table[:, 3] - table[:, 2]), queries / self.model.heads)

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Full-attention query-key pairs of each length (float64)."""
        return causal_pairs(lengths).astype(np.float64)

    def window_pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Sliding-window query-key pairs of each length (float64)."""
        return window_pairs(lengths, self.model.window, self.model.sinks).astype(np.float64)
