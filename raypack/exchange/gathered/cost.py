"""What gathered keys and values (kv_gather, LASP-2H) ask of ranks, as ask, addition and floor (`exchange.asks`).

Queries stay in their shards; K and V of a block are padded to its longest shard and sent to each other rank. A rank
computes the causal pairs of its own queries, so the last ranks of a document do most.
"""

from __future__ import annotations

import numpy as np

from raypack.cost.rates import PASSES, Rates, causal_pairs
from raypack.exchange.asks import Addition, Ask, Floor
from raypack.exchange.cohorts import Cohorts, Shards, launches
from raypack.plan.grid import grid
from raypack.plan.names import KV_GATHER
from raypack.plan.topology import Block, Topology

SITE = "kv_gather"


def ask(shards: Shards, cohorts: Cohorts, rates: Rates, recompute: str) -> Ask:
    """Exact to the token, for documents with parent = child."""
    world, passes = shards.world, PASSES[recompute].exchange
    heads, kv_heads = rates.model.heads, 2 * rates.model.kv_heads
    found = Ask.nothing(world, SITE)
    for block, lengths, rows in _blocks(shards, cohorts):
        ranks, longest = slice(block.first, block.end), int(rows.max())
        found.copy_to_all(SITE, ranks, passes * longest * kv_heads * rates.head_bytes, passes, shards.where, rates)
        found.pairs[ranks] += _own_pairs(lengths, rows)
        found.held[ranks] += block.width * longest * kv_heads + rows * heads
    found.calls[:] = launches(cohorts, world)
    return found


def _blocks(shards: Shards, cohorts: Cohorts) -> list[tuple[Block, np.ndarray, np.ndarray]]:
    """Each block, the lengths of its documents in canonical order, and its rows on each of its ranks."""
    held, rows, blocks = shards.held(cohorts), shards.rows, []
    for first, width in sorted(set(zip(cohorts.child_first.tolist(), cohorts.child_width.tolist(), strict=True))):
        mine = (cohorts.child_first[held.cohort] == first) & (cohorts.child_width[held.cohort] == width)
        own = np.bincount(held.rank[mine] - first, held.own[mine], width).astype(np.int64)
        inside = (rows.attention == KV_GATHER) & (rows.child_first == first) & (rows.child_width == width)
        blocks.append((Block(first, width), rows.length[inside], own))
    return blocks


def _own_pairs(lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Causal pairs of the queries on each rank: documents lie one after another and are cut into shards of `rows`."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    before = np.concatenate(([0], np.cumsum(causal_pairs(lengths))))
    edges = np.concatenate(([0], np.cumsum(rows)))
    document = np.searchsorted(starts, edges, side="right") - 1
    return np.diff(before[document] + causal_pairs(edges - starts[document]))


def shares(width: int) -> np.ndarray:
    """Of c ranks that hold one document evenly, number i computes (2 i + 1) / c^2 of the causal pairs."""
    return (2 * np.arange(width) + 1) / width**2


def addition(topology: Topology, rates: Rates, parent: Block, child: Block) -> Addition:
    """A token of a document that lies evenly on its block: its K and V go to every other rank."""
    node, width = grid(topology).node[parent.first : parent.end], parent.width
    near = np.bincount(node - node[0])[node - node[0]]
    kv_heads, held = 2 * rates.model.kv_heads, np.full(width, 2.0 * rates.model.kv_heads)
    sent = kv_heads * np.stack([near - 1, near - 1, width - near, width - near]) / width
    return Addition(shares(width), held + rates.model.heads / width, sent, np.zeros((4, width)))


def floor(topology: Topology, rates: Rates, parent: Block, child: Block) -> Floor:
    """The stream may put the document on any of the ranks: the busiest computes at least its even share of the pairs,
    and padding only adds to what the tokens themselves send."""
    node, width = grid(topology).node[parent.first : parent.end], parent.width
    near = np.bincount(node - node[0])[node - node[0]]
    size = 2 * rates.model.kv_heads * rates.head_bytes
    intra = float((near - 1).min()) * size / rates.cluster.intra_rate
    inter = float((width - near).min()) * size / rates.cluster.inter_rate
    least = max(intra, inter) / width
    held = 2 * rates.model.kv_heads + rates.model.heads / width
    return Floor(1 / width, held, least, least, 0.0, intra, inter, calls=1 if width > 1 else 0)
