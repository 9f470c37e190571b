"""Gathers of layers that leave tokens in their shards: K and V for F layers (`kv_gather`), states for L layers.

Both are counted as what a rank sends to each other rank of a block. Gathered K and V are padded to the longest shard of
the block; a rank computes the causal pairs of its own queries, so the last ranks of a document do most. States are one
slot a child width of the component, whatever the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.planning.cost import PASSES, Costs
from raypack.planning.flops import causal_pairs
from raypack.planning.grid import Grid, unions


@dataclass(frozen=True)
class Gathered:
    """What gathers ask of every rank: float64 [world], one layer, all passes of a step.

    Attributes:
        pairs: query-key pairs over all heads, one pass.
        held: tokens x heads in memory.
        seconds, latency: of the collectives: bytes, and the rest.
        intra, inter: bytes sent (int64).
    """

    pairs: np.ndarray
    held: np.ndarray
    seconds: np.ndarray
    latency: np.ndarray
    intra: np.ndarray
    inter: np.ndarray

    @classmethod
    def nothing(cls, world: int) -> Gathered:
        zero, none = np.zeros(world), np.zeros(world, dtype=np.int64)
        return cls(zero.copy(), zero.copy(), zero.copy(), zero.copy(), none.copy(), none.copy())

    def send(self, ranks: slice, size: int, calls: int, where: Grid, costs: Costs) -> None:
        """Every rank of a block sends `size` bytes to each other one, in `calls` collectives."""
        near = np.minimum(where.node_end[ranks], ranks.stop) - np.maximum(where.node_first[ranks], ranks.start)
        intra, inter = size * (near - 1), size * (ranks.stop - ranks.start - near)
        self.intra[ranks] += intra
        self.inter[ranks] += inter
        self.seconds[ranks] += np.maximum(intra / costs.cluster.intra_rate, inter / costs.cluster.inter_rate)
        self.latency[ranks] += calls * costs.latency(
            crosses=bool(where.node[ranks.start] != where.node[ranks.stop - 1])
        )


def gather_keys(
    blocks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]], where: Grid, costs: Costs, recompute: str
) -> Gathered:
    """The kv_gather documents of a round.

    Args:
        blocks: {(first rank, width): (lengths of its documents in canonical order, rows of each of its ranks)}.
    """
    found, passes = Gathered.nothing(len(where.node)), PASSES[recompute].exchange
    heads, kv_heads = costs.model.heads, 2 * costs.model.kv_heads
    for (first, width), (lengths, rows) in blocks.items():
        ranks, longest = slice(first, first + width), int(rows.max())
        found.send(ranks, passes * longest * kv_heads * costs.head_bytes, passes, where, costs)
        found.pairs[ranks] += _own_pairs(lengths, rows)
        found.held[ranks] += width * longest * kv_heads + rows * heads
    return found


def _own_pairs(lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Causal pairs of the queries on each rank: documents lie one after another and are cut into shards of `rows`."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    before = np.concatenate(([0], np.cumsum(causal_pairs(lengths))))
    edges = np.concatenate(([0], np.cumsum(rows)))
    document = np.searchsorted(starts, edges, side="right") - 1
    return np.diff(before[document] + causal_pairs(edges - starts[document]))


def gather_states(
    child_first: np.ndarray, child_width: np.ndarray, where: Grid, costs: Costs, recompute: str
) -> Gathered:
    """The states of one L layer of a round, from its child blocks."""
    found, passes = Gathered.nothing(len(where.node)), PASSES[recompute].exchange
    for a, b in zip(*(x.tolist() for x in unions(child_first, child_width)), strict=True):
        if b - a > 1:
            inside = (child_first >= a) & (child_first < b) & (child_width > 1)
            size = len(np.unique(child_width[inside])) * costs.state_bytes(recompute)
            found.send(slice(a, b), size, passes * costs.state_calls, where, costs)
    return found
