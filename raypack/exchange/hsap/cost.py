"""What hsap asks of ranks, as ask, addition and floor (`exchange.asks`): heads split over the ranks of each node,
segments of documents over the nodes.

Segments and transfers are those that the ranks themselves use, so bytes are exact. Keys that cross
nodes travel while the ranks attend to what they have: only what takes longer than that is charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypack.cost.rates import PASSES, Rates, causal_pairs
from raypack.exchange.asks import Addition, Ask, Floor
from raypack.exchange.cohorts import Cohorts, Documents, Shards
from raypack.exchange.heads.cost import HeadWeights, weights_of
from raypack.exchange.hsap.transfers import STEP_ROWS, Pack, Segmentation, Transfers, part, transfers_of
from raypack.exchange.layout import head_share
from raypack.plan.topology import Block, Topology

SITE = "kv_exchange"


def ask(shards: Shards, cohorts: Cohorts, rates: Rates, recompute: str, pair_seconds: float) -> Ask:
    """Exact to the token, for cohorts whose parent spans nodes of one size.

    Args:
        pair_seconds: of attention, a query-key pair over all heads, all passes: what keys on their way hide behind.
    """
    documents, where, found = shards.documents(cohorts), shards.where, Ask.nothing(shards.world, SITE)
    for ranks, _ in cohorts.components(where):
        first, end = ranks.start, ranks.stop
        inside = (documents.parent_first >= first) & (documents.parent_first < end)
        width = int(where.node_end[first] - first)
        block = _Block(documents.select(inside), shards.edges, first, end, width, rates)
        _attend(found, block)
        _exchange(found, block)
        _keys(found, block, rates, recompute, pair_seconds)
    return found


@dataclass(frozen=True)
class _Block:
    """The spread documents of one widest parent [first, end) with nodes of `width` ranks."""

    documents: Documents
    edges: np.ndarray
    first: int
    end: int
    width: int
    rates: Rates

    @cached_property
    def nodes(self) -> int:
        return (self.end - self.first) // self.width

    @cached_property
    def heads(self) -> HeadWeights:
        """Of the ranks of one node."""
        return weights_of(self.rates, self.width)

    def ranks(self, node: int) -> slice:
        return slice(self.first + node * self.width, self.first + (node + 1) * self.width)

    @cached_property
    def _compiled(self) -> tuple[Segmentation, Transfers]:
        d = self.documents
        packs, parents = [], zip(d.parent_first.tolist(), d.parent_width.tolist(), strict=True)
        for first, width in sorted(set(parents), key=lambda p: (-p[1], p[0])):
            mine = (d.parent_first == first) & (d.parent_width == width)
            homes = (self._home_ranks[mine] - first) // self.width
            place = (first - self.first) // self.width
            packs.append(Pack(place, width // self.width, d.length[mine].tobytes(), homes.tobytes()))
        return transfers_of(tuple(packs), STEP_ROWS)

    @property
    def segments(self) -> Segmentation:
        return self._compiled[0]

    @property
    def transfers(self) -> Transfers:
        return self._compiled[1]

    @cached_property
    def _home_ranks(self) -> np.ndarray:
        """int64 [documents]: the rank that holds the first token."""
        d = self.documents
        homes = np.empty_like(d.at)
        for edge in np.unique(d.edge).tolist():
            mine = np.flatnonzero(d.edge == edge)
            width = int(d.child_width[mine[0]])
            shard = np.searchsorted(self.edges[edge : edge + width + 1], d.at[mine], side="right") - 1
            homes[mine] = d.child_first[mine] + shard
        return homes

    @cached_property
    def moved(self) -> np.ndarray:
        """int64 [ranks, nodes]: tokens that each rank's shards hold and each node attends for."""
        d, s = self.documents, self.segments
        start = d.at[s.document] + s.low
        order = np.argsort(start, kind="stable")
        start, size, node, edge = (x[order] for x in (start, s.high - s.low, s.node, d.edge[s.document]))
        found = np.zeros((self.end - self.first, self.nodes), dtype=np.int64)
        for stream in np.unique(edge).tolist():
            mine = edge == stream
            document = int(np.flatnonzero(d.edge == stream)[0])
            ranks = int(d.child_first[document]) - self.first + np.arange(int(d.child_width[document]))
            cuts = self.edges[stream : stream + len(ranks) + 1]
            begin, tokens = start[mine], size[mine]
            owner = np.zeros((len(begin), self.nodes), dtype=np.int64)
            owner[np.arange(len(begin)), node[mine]] = 1
            before = np.concatenate([np.zeros((1, self.nodes), np.int64), np.cumsum(owner * tokens[:, None], axis=0)])
            at = np.searchsorted(begin, cuts, side="right") - 1
            inside = np.clip(cuts - begin[at], 0, tokens[at])[:, None] * owner[at]
            found[ranks] += np.diff(np.where(at[:, None] < 0, 0, before[at] + inside), axis=0)
        return found


def _attend(found: Ask, block: _Block) -> None:
    """Every token's queries see all keys up to it, wherever they come from."""
    segments, transfers = block.segments, block.transfers
    pairs = (causal_pairs(segments.high) - causal_pairs(segments.low)).astype(np.float64)
    pairs, tokens = (
        np.bincount(segments.node, values, block.nodes) for values in (pairs, segments.high - segments.low)
    )
    steps = np.unique(transfers.target * max(transfers.ticks, 1) + transfers.tick) // max(transfers.ticks, 1)
    steps = np.bincount(steps, minlength=block.nodes)
    for node in range(block.nodes):
        ranks = block.ranks(node)
        found.pairs[ranks] += pairs[node] * block.heads.share
        found.held[ranks] += tokens[node] * block.heads.into
        found.calls[ranks] += 1 + steps[node]


def _exchange(found: Ask, block: _Block) -> None:
    """Tokens to heads and back, head by head: a rank's own part is free."""
    moved, shares = block.moved, len(block.heads.into)
    index = np.arange(block.end - block.first)
    node = index // block.width
    own = moved[index, node]
    to_others = moved.sum(axis=1) - own
    into, queries = (np.tile(x, block.nodes) for x in (block.heads.into, block.heads.queries))
    into_node, queries_node = int(block.heads.into.sum()), int(block.heads.queries.sum())
    by_node = moved.reshape(block.nodes, shares, block.nodes).sum(axis=1)
    near = by_node[node, node] - own
    far = by_node.sum(axis=0)[node] - by_node[node, node]
    ranks = slice(block.first, block.end)
    found.inward[:, ranks] += (own * (into_node - into), to_others * into_node, into * near, into * far)
    found.outward[:, ranks] += (queries * near, queries * far, own * (queries_node - queries), to_others * queries_node)


def _keys(found: Ask, block: _Block, rates: Rates, recompute: str, pair_seconds: float) -> None:
    """K and V go out once a forward and once more for the backward, their gradients come back once."""
    forwards, size = PASSES[recompute].exchange, rates.head_bytes
    intra_sent, inter_sent = found.sent[SITE]
    kinds = _key_ranges(rates, block.width)
    moves = block.transfers
    rows = (np.bincount(end, moves.high - moves.low, block.nodes) for end in (moves.source, moves.target))
    for node, (sent, received) in enumerate(zip(*(each.astype(np.int64).tolist() for each in rows), strict=True)):
        for share, (low, high) in enumerate(kinds):
            if high == low:
                continue
            sharers = [i for i, pair in enumerate(kinds) if pair == (low, high)]
            index, vectors = sharers.index(share), 2 * (high - low) * size
            out, into = (b - a for a, b in (part(rows, len(sharers), index) for rows in (sent, received)))
            # Parts go round the sharers; going back, each part's gradients come from every sharer.
            give, take = (len(sharers) - 1) * into, received - into
            inter = (forwards * out + into, forwards * into + out)
            intra = (forwards * give + take, forwards * take + give)
            rank = block.first + node * block.width + share
            intra_sent[rank] += intra[0] * vectors
            inter_sent[rank] += inter[0] * vectors
            bytes_ = max(inter) * vectors / rates.cluster.inter_rate, max(intra) * vectors / rates.cluster.intra_rate
            seconds = max(bytes_) + (forwards + 1) * moves.ticks * rates.latency(crosses=True)
            hidden = found.pairs[rank] * pair_seconds
            found.seconds[rank] += max(0.0, seconds - hidden)


def _key_ranges(rates: Rates, width: int) -> list[tuple[int, int]]:
    """KV heads [first, end) of every rank of a node."""
    return [share[2:] for share in head_share(rates.model.heads, rates.model.kv_heads, width)]


def addition(topology: Topology, rates: Rates, parent: Block, child: Block) -> Addition:
    """A token of a document that lies evenly on `child` and of which every node of `parent` attends for as much.

    Tokens that the child's nodes hold beyond that go to other nodes; K and V go on to half of the others, as causality
    asks in the mean.
    """
    nodes = len(topology.node_sizes(parent))
    width = parent.width // nodes
    held, world = weights_of(rates, width), np.arange(parent.width)
    own = ((world >= child.first - parent.first) & (world < child.end - parent.first)) / child.width
    node = world // width
    there = np.bincount(node, own, nodes)[node]
    kept = np.minimum(there, 1 / nodes)
    stays, leaves = own * kept / np.where(there > 0, there, 1), own * (1 - kept / np.where(there > 0, there, 1))
    comes = 1 / nodes - kept
    into, queries = np.tile(held.into, nodes), np.tile(held.queries, nodes)
    keys = np.tile(held.copied, nodes) * (nodes - 1) / (2 * nodes)

    def moved(heads: np.ndarray, extra: np.ndarray | float) -> np.ndarray:
        every = heads[:width].sum()
        near = stays * (every - heads), heads * (kept - stays)
        return np.stack([*near, leaves * every + extra, heads * comes + extra])

    return Addition(np.tile(held.share, nodes) / nodes, into / nodes, moved(into, keys), moved(queries, 0.0))


def floor(topology: Topology, rates: Rates, parent: Block, child: Block) -> Floor:
    """At home, whatever the plan holds besides, the document may move nothing; the busiest node attends for at least
    its even share."""
    nodes = len(topology.node_sizes(parent))
    held = weights_of(rates, parent.width // nodes)
    return Floor(float(held.share.max()) / nodes, float(held.into.max()) / nodes, calls=2)
