"""hsap over nodes as load: heads split over the ranks of each node, segments of documents over the nodes.

Segments and transfers are those of `parallel.segments` and `parallel.kv_transfers`, so bytes are exact. Keys that cross
nodes travel while the ranks attend to what they have: only what takes longer than that is charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypack.cost.costs import PASSES, Costs, HeadWeights
from raypack.cost.flops import causal_pairs
from raypack.exchange.hsap.segments import Segmentation
from raypack.exchange.hsap.transfers import STEP_ROWS, Pack, Transfers, part, transfers_of
from raypack.plan.grid import Grid, unions
from raypack.plan.heads import head_share


@dataclass(frozen=True)
class SpreadDocuments:
    """int64 arrays [documents], in canonical order. `at` is the document's first token on the axis of all child
    streams; edges[edge : edge + child_width + 1] are its stream's shards on that axis."""

    length: np.ndarray
    parent_first: np.ndarray
    parent_width: np.ndarray
    child_first: np.ndarray
    child_width: np.ndarray
    at: np.ndarray
    edge: np.ndarray

    def select(self, mask: np.ndarray) -> SpreadDocuments:
        return SpreadDocuments(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class SpreadLoad:
    """float64 arrays [world] of one full layer; `inward` and `outward` are heads x tokens of one pass, in the order
    (sent intra, sent inter, received intra, received inter).

    Attributes:
        pairs: query-key pairs times the share of the heads.
        held: tokens x heads.
        calls: attention calls of one pass.
        seconds: of K and V on their way, all passes, beyond what attention hides.
        intra, inter: bytes of K and V and their gradients sent, all passes (int64).
    """

    pairs: np.ndarray
    held: np.ndarray
    calls: np.ndarray
    inward: np.ndarray
    outward: np.ndarray
    seconds: np.ndarray
    intra: np.ndarray
    inter: np.ndarray


def spread_load(documents: SpreadDocuments, edges: np.ndarray, where: Grid, costs: Costs, recompute: str) -> SpreadLoad:
    """The spread documents of a round."""
    world = len(where.node)
    found = SpreadLoad(
        pairs=np.zeros(world),
        held=np.zeros(world),
        calls=np.zeros(world),
        inward=np.zeros((4, world)),
        outward=np.zeros((4, world)),
        seconds=np.zeros(world),
        intra=np.zeros(world, dtype=np.int64),
        inter=np.zeros(world, dtype=np.int64),
    )
    first, end = unions(documents.parent_first, documents.parent_width)
    for a, b in zip(first.tolist(), end.tolist(), strict=True):
        inside = (documents.parent_first >= a) & (documents.parent_first < b)
        block = _Block(documents.select(inside), edges, a, b, int(where.node_end[a] - a), costs)
        _attend(found, block)
        _exchange(found, block)
        _keys(found, block, costs, recompute)
    return found


@dataclass(frozen=True)
class _Block:
    """The spread documents of one widest parent [first, end) with nodes of `width` ranks."""

    documents: SpreadDocuments
    edges: np.ndarray
    first: int
    end: int
    width: int
    costs: Costs

    @cached_property
    def nodes(self) -> int:
        return (self.end - self.first) // self.width

    @cached_property
    def heads(self) -> HeadWeights:
        """Of the ranks of one node."""
        return self.costs.weights("hsap", self.width)

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


def _attend(found: SpreadLoad, block: _Block) -> None:
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


def _exchange(found: SpreadLoad, block: _Block) -> None:
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


def _keys(found: SpreadLoad, block: _Block, costs: Costs, recompute: str) -> None:
    """K and V go out once a forward and once more for the backward, their gradients come back once."""
    forwards, size = PASSES[recompute].exchange, costs.head_bytes
    kinds = _key_ranges(costs, block.width)
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
            found.inter[rank] += inter[0] * vectors
            found.intra[rank] += intra[0] * vectors
            bytes_ = max(inter) * vectors / costs.cluster.inter_rate, max(intra) * vectors / costs.cluster.intra_rate
            seconds = max(bytes_) + (forwards + 1) * moves.ticks * costs.latency(crosses=True)
            hidden = found.pairs[rank] * costs.attention_seconds(recompute)
            found.seconds[rank] += max(0.0, seconds - hidden)


def _key_ranges(costs: Costs, width: int) -> list[tuple[int, int]]:
    """KV heads [first, end) of every rank of a node."""
    return [share[2:] for share in head_share(costs.model.heads, costs.model.kv_heads, width)]
