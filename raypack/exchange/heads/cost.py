"""What exchanging heads (Ulysses) asks of ranks, as ask, addition and floor (`exchange.asks`).

Query heads are split as evenly as possible over the block, KV heads go along and are copied where ranks outnumber them.
Beyond H ranks there are no more heads to share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raypack.cost.rates import PASSES, Rates
from raypack.exchange.asks import Addition, Ask, Floor
from raypack.exchange.cohorts import Cohorts, Held, Shards, launches
from raypack.exchange.layout import head_share
from raypack.plan.grid import Grid, grid
from raypack.plan.topology import Block, Topology

COLLECTIVES = 2
"""Of a layer and pass: in and out."""


@dataclass(frozen=True)
class HeadWeights:
    """What the ranks of a block hold of one sample, by index in the block.

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


@lru_cache(maxsize=4096)
def weights(heads: int, kv_heads: int, width: int) -> HeadWeights:
    """Heads by rank of a block of `width`, split evenly."""
    table = np.array(head_share(heads, kv_heads, width), dtype=np.int64)
    queries = table[:, 1] - table[:, 0]
    return HeadWeights(queries, 2 * (table[:, 3] - table[:, 2]), queries / heads)


def weights_of(rates: Rates, width: int) -> HeadWeights:
    return weights(rates.model.heads, rates.model.kv_heads, width)


def ask(shards: Shards, cohorts: Cohorts, pairs: np.ndarray, rates: Rates) -> Ask:
    """Exact to the token. `pairs` [cohorts]: query-key pairs of each; latencies: `latency`."""
    held, world = shards.held(cohorts), shards.world
    queries, into, share, into_node, queries_node, into_all = _of_entries(cohorts, held, shards.where, rates)

    def at_rank(values: np.ndarray) -> np.ndarray:
        return np.bincount(held.rank, values, world)

    inward = (
        held.own * (into_node - into),
        held.own * (into_all - into_node),
        into * (held.node - held.own),
        into * held.others,
    )
    outward = (
        queries * (held.node - held.own),
        queries * held.others,
        held.own * (queries_node - queries),
        held.own * (rates.model.heads - queries_node),
    )
    return Ask(
        pairs=at_rank(pairs[held.cohort] * share),
        held=at_rank(cohorts.tokens[held.cohort] * into),
        calls=launches(cohorts, world),
        inward=np.stack([at_rank(x) for x in inward]),
        outward=np.stack([at_rank(x) for x in outward]),
        seconds=np.zeros(world),
        latency=np.zeros(world),
    )


def _of_entries(cohorts: Cohorts, held: Held, where: Grid, rates: Rates) -> tuple[np.ndarray, ...]:
    """Per entry of `held`: query heads, Q+K+V heads, pair share; sums over the rank's node; sum over the block."""
    kinds, index = np.unique(cohorts.parent_width, return_inverse=True)
    tables = [weights_of(rates, width) for width in kinds.tolist()]
    sizes = np.array([len(t.queries) + 1 for t in tables], dtype=np.int64)
    at = (np.cumsum(sizes) - sizes)[index][held.cohort]
    zero = np.zeros(1, dtype=np.int64)
    queries = np.concatenate([zero, *(np.append(t.queries, 0) for t in tables)])[1:]
    into = np.concatenate([zero, *(np.append(t.into, 0) for t in tables)])[1:]
    share = np.concatenate([zero, *(np.append(t.share, 0.0) for t in tables)])[1:]
    into_sum = np.concatenate([zero, np.cumsum(into)])
    queries_sum = np.concatenate([zero, np.cumsum(queries)])
    first, width = cohorts.parent_first[held.cohort], cohorts.parent_width[held.cohort]
    me = at + held.rank - first
    low = at + np.maximum(where.node_first[held.rank] - first, 0)
    high = at + np.minimum(where.node_end[held.rank] - first, width)
    return (
        queries[me],
        into[me],
        share[me],
        into_sum[high] - into_sum[low],
        queries_sum[high] - queries_sum[low],
        into_sum[at + width] - into_sum[at],
    )


def latency(cohorts: Cohorts, where: Grid, rates: Rates, recompute: str) -> np.ndarray:
    """Seconds of a layer's exchanges on every rank's component, all passes: 0 alone, by scope elsewhere."""
    out = np.zeros(len(where.node))
    for ranks, crosses in cohorts.components(where):
        out[ranks] = rates.latency(crosses)
    return out * COLLECTIVES * PASSES[recompute].exchange


def addition(topology: Topology, rates: Rates, parent: Block, child: Block) -> Addition:
    """A token that lies evenly on `child`, its heads on `parent`."""
    held = weights_of(rates, parent.width)
    return Addition(
        share=held.share,
        held=held.into,
        inward=sides(topology, parent, child, held.into),
        outward=sides(topology, parent, child, held.queries),
    )


def sides(topology: Topology, block: Block, child: Block, heads: np.ndarray) -> np.ndarray:
    """Heads a token that every rank of `block` moves in an exchange of `heads` [width] a rank: [4, width].

    Tokens' side inside the node, heads' side inside, tokens' side across, heads' side across.
    """
    node = grid(topology).node[block.first : block.end]
    node = node - node[0]
    own = np.zeros(block.width)
    own[child.first - block.first : child.end - block.first] = 1 / child.width

    def on_node(values: np.ndarray) -> np.ndarray:
        return np.bincount(node, values)[node]

    return np.stack(
        [
            own * (on_node(heads) - heads),
            heads * (on_node(own) - own),
            own * (heads.sum() - on_node(heads)),
            heads * (1 - on_node(own)),
        ]
    )


def floor(topology: Topology, rates: Rates, block: Block, child: Block) -> Floor:
    """In plus out exchange of one layer forward, for every plan around the sample.

    Tokens' shards and what receivers get hang together. If a rank of the child holds a share m of the sample, the whole
    stream is so long that every rank of the child computes at least m x n tokens; against that, a receiver gets up to m
    x (ranks of its node) fewer tokens. Where a token computes longer than it travels (`slope`), lying evenly is best,
    and receivers' floors are those of even shards (`even`); else only receivers outside the child count (`anywhere`).
    """
    cluster, held, scale = rates.cluster, weights_of(rates, block.width), rates.head_bytes
    node = grid(topology).node[block.first : block.end]
    inside = np.zeros(block.width, dtype=bool)
    inside[child.first - block.first : child.end - block.first] = True
    mates = np.bincount(node - node[0], inside)[node - node[0]]
    apart, local = mates == 0, len(np.unique(node[inside])) == 1
    even = anywhere = slope = intra = inter = 0.0
    for heads in (held.into, held.queries):
        on_node = np.bincount(node - node[0], heads)[node - node[0]]
        # The average rank of the child is a floor for the busiest sender, wherever the tokens lie.
        sends_intra = float((on_node - heads)[inside].min()) * scale / cluster.intra_rate
        sends_inter = float((heads.sum() - on_node)[inside].min()) * scale / cluster.inter_rate
        gets_inter = heads * (1 - mates / child.width) * scale / cluster.inter_rate
        gets_intra = heads * ((mates - inside) / child.width) * scale / cluster.intra_rate
        sends = max(sends_intra, sends_inter) / child.width
        outside = max(gets_inter[apart].max(initial=0.0), gets_intra[~inside & local].max(initial=0.0))
        even += max(sends, float(gets_inter.max()), float(gets_intra.max()))
        anywhere += max(sends, float(outside))
        slope += float((heads * mates).max()) * scale / min(cluster.inter_rate, cluster.intra_rate)
        intra += sends_intra
        inter += sends_inter
    calls = COLLECTIVES if block.width > 1 else 0
    return Floor(float(held.share.max()), float(held.into.max()), even, anywhere, slope, intra, inter, calls)
