"""The choices for one sample alone: a parent width and a child width, with what they cost as functions of its length.

Seconds, area and memory of a length n are sums of a few coefficients times pairs(n), window_pairs(n), n and 1, so a
whole table (lengths x shapes) is one matrix product. Planner and bounds read the same table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from raypack.cost.costs import Costs
from raypack.plan.topology import Block, Topology
from raypack.planning.floors import COEFFICIENTS, coefficients, variants

MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights v of intra against inter seconds in the area bound."""


@dataclass(frozen=True)
class Shapes:
    """Arrays [shapes], ordered by (parent width, child width) ascending.

    Attributes:
        parent, child: widths.
        local: whether the child is inside one node.
        full, window: seconds a pair (largest head share of the block).
        linear: seconds a token, exchanges left out.
        full_exchange, sparse_exchange: least seconds a token, largest rank, all layers and passes.
        latency: seconds of the collectives of one round.
        intra, inter: seconds of rate a token, bytes sent by all ranks together.
        full_held, sparse_held: share of the sample's heads on the rank that holds most (memory).
        padded: whether F layers hold a sample as if all shards were as long as the longest (kv_gather).
    """

    parent: np.ndarray
    child: np.ndarray
    local: np.ndarray
    full: np.ndarray
    window: np.ndarray
    linear: np.ndarray
    full_exchange: np.ndarray
    sparse_exchange: np.ndarray
    latency: np.ndarray
    intra: np.ndarray
    inter: np.ndarray
    full_held: np.ndarray
    sparse_held: np.ndarray
    costs: Costs
    recompute: str
    padded: bool

    def __len__(self) -> int:
        return len(self.parent)

    def select(self, mask: np.ndarray) -> Shapes:
        return replace(self, **{k: v[mask] for k, v in vars(self).items() if isinstance(v, np.ndarray)})

    def index(self, parent: int, child: int) -> int:
        return int(np.flatnonzero((self.parent == parent) & (self.child == child))[0])

    def full_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Full attention on the busiest rank: [lengths, shapes]."""
        return np.outer(self.costs.pairs(lengths), self.full)

    def cheap_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Everything else on the busiest rank, sparse exchanges included: [lengths, shapes]."""
        window = np.outer(self.costs.window_pairs(lengths), self.window)
        # Shards differ by a token, so a rank is sure to hold only the whole part of its share.
        shard = lengths[:, None] // self.child[None, :]
        return window + shard * self.linear + np.outer(lengths, self.sparse_exchange)

    def seconds(self, lengths: np.ndarray) -> np.ndarray:
        """The sample alone: [lengths, shapes]. No plan runs it in less."""
        exchange = np.outer(lengths, self.full_exchange) + self.latency
        return self.full_seconds(lengths) + self.cheap_seconds(lengths) + exchange

    def work(self, lengths: np.ndarray) -> np.ndarray:
        """Compute seconds summed over ranks, no communication, no rounding up of heads: [lengths]."""
        attention = self.costs.attention_seconds(self.recompute)
        full = self.costs.pairs(lengths) * self.costs.full_layers
        window = self.costs.window_pairs(lengths) * self.costs.sparse_layers
        return (full + window) * attention + lengths * self.linear[0]

    def area(self, lengths: np.ndarray, mix: float) -> np.ndarray:
        """Rank-seconds that the sample takes from the cluster at least: [lengths, shapes]."""
        return self.work(lengths)[:, None] + np.outer(lengths, mix * self.intra + (1 - mix) * self.inter)

    def need(self, lengths: np.ndarray) -> np.ndarray:
        """Least cap under which the sample fits alone, in tokens of a rank: [lengths, shapes]."""
        tokens = -(-lengths[:, None] // self.child[None, :])
        full = (tokens * self.child if self.padded else lengths[:, None]) * self.full_held
        return np.maximum(tokens, np.maximum(full, np.outer(lengths, self.sparse_held)))

    def fits(self, lengths: np.ndarray, cap: int = 0) -> np.ndarray:
        """Whether the sample alone keeps both memory limits (0: of this recompute): bool [lengths, shapes]."""
        return self.need(lengths) <= (cap or self.costs.cap(self.recompute))


def shapes(topology: Topology, costs: Costs, recompute: str = "none", attention: str = "ulysses") -> Shapes:
    """All legal (parent width, child width) of a topology.

    Where blocks of one width lie differently across nodes, each coefficient is the least over them, so that tables
    stay a floor. `attention` of full layers: `kv_gather` has parent = child only, `hsap` parents with nodes of one
    size; `auto` takes the least of all in each coefficient.
    """
    rows = []
    for (parent, child), pairs in sorted(variants(topology, costs).items()):
        found = [
            coefficients(topology, costs, recompute, *pair, kind)
            for pair in pairs
            for kind in _kinds(topology, *pair)
            if attention in (kind, "auto")
        ]
        if found:
            rows.append((parent, child, *np.min(found, axis=0)))
    parent, child, crosses, *columns = np.array(rows, dtype=np.float64).T
    return Shapes(
        parent=parent.astype(np.int64),
        child=child.astype(np.int64),
        local=crosses == 0,
        costs=costs,
        recompute=recompute,
        padded=attention == "kv_gather",
        **dict(zip(COEFFICIENTS, columns, strict=True)),
    )


def _kinds(topology: Topology, parent: Block, child: Block) -> tuple[str, ...]:
    """The attentions that are possible; on one rank they are all the same."""
    gathers = ("kv_gather",) if parent == child else ()
    spreads = ("hsap",) if len(set(topology.node_sizes(parent))) == 1 else ()
    return ("ulysses", *gathers, *spreads)
