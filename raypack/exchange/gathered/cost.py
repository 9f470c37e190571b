"""Gathers of layers that leave tokens in their shards: K and V for F layers (`kv_gather`), states for L layers.

Both are counted as what a rank sends to each other rank of a block. Gathered K and V are padded to the longest shard of
the block; a rank computes the causal pairs of its own queries, so the last ranks of a document do most. States are one
slot a child width of the component, whatever the number of tokens.
"""

from __future__ import annotations

import numpy as np

from raypack.cost.costs import PASSES, Costs
from raypack.cost.flops import causal_pairs
from raypack.cost.gathered import Gathered
from raypack.plan.grid import Grid


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
