"""What one round asks of every rank: seconds, bytes and memory, exact to the token (docs/planning.md).

The shards are those of `parallel.layout` (a test compares them); computed here for all ranks at once, as arrays over
*groups*, which are neighbouring placements with equal parent, child and attention.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from raypack.cost.costs import PASSES, Costs
from raypack.exchange.gathered.cost import gather_keys
from raypack.exchange.hsap.cost import SpreadDocuments, spread_load
from raypack.exchange.lasp2.cost import gather_states
from raypack.plan.grid import Grid, grid, spread, unions
from raypack.plan.names import ATTENTIONS, HSAP, KV_GATHER
from raypack.plan.table import RoundTable
from raypack.plan.topology import Topology


@dataclass(frozen=True)
class RoundLoad:
    """One round on every rank. Arrays [world], seconds of one layer with all passes of a step unless said otherwise.

    Attributes:
        full: attention of a full layer, launches included.
        window: attention of a sparse layer, launches included.
        linear: projections and feed-forward of any layer.
        recurrent: what an L layer adds to that: its recurrence, and the gather of states (as if nothing hid it).
        full_exchange, sparse_exchange: all-to-alls of a full / sparse layer, bytes only; and how much longer than
            attention the keys of hsap and the gathers of kv_gather take.
        full_latency, sparse_latency: the same, latencies only.
        tokens: child tokens (count).
        full_held, sparse_held: tokens x heads held / heads of one token (count).
        sent: bytes of the whole round and step, all layers and passes: {site: (intra [world], inter [world])}.
        pack_first, pack_end: rank intervals of the packs, in rank order.
        recompute: of the round.
    """

    full: np.ndarray
    window: np.ndarray
    linear: np.ndarray
    recurrent: np.ndarray
    full_exchange: np.ndarray
    sparse_exchange: np.ndarray
    full_latency: np.ndarray
    sparse_latency: np.ndarray
    tokens: np.ndarray
    full_held: np.ndarray
    sparse_held: np.ndarray
    sent: dict[str, tuple[np.ndarray, np.ndarray]]
    pack_first: np.ndarray
    pack_end: np.ndarray
    recompute: str


@dataclass(frozen=True)
class _Groups:
    """Arrays [groups] in canonical order; `low`, `high` = token interval on the axis of all child streams."""

    parent_first: np.ndarray
    parent_width: np.ndarray
    child_first: np.ndarray
    child_width: np.ndarray
    attention: np.ndarray
    pairs: np.ndarray
    window_pairs: np.ndarray
    tokens: np.ndarray
    low: np.ndarray
    high: np.ndarray
    edge: np.ndarray

    def select(self, mask: np.ndarray) -> _Groups:
        return self if mask.all() else _Groups(*(getattr(self, field.name)[mask] for field in fields(self)))


@dataclass(frozen=True)
class _Held:
    """Who holds what of each group: one entry for every rank of the block that holds its heads."""

    group: np.ndarray
    rank: np.ndarray
    own: np.ndarray
    node: np.ndarray
    others: np.ndarray


def load_round(rows: RoundTable, topology: Topology, costs: Costs, recompute: str) -> RoundLoad:
    """Apply the cost model to one round of a legal plan."""
    world, where, passes = topology.world, grid(topology), PASSES[recompute]
    groups, edges, tokens = _streams(rows, costs, world)
    children = _child_groups(groups)
    layers = {"full": costs.full_layers, "sparse": costs.sparse_layers}
    stay = (groups.attention == KV_GATHER) & (groups.child_width > 1)
    last = groups.parent_first + groups.parent_width - 1
    across = (groups.attention == HSAP) & (where.node[groups.parent_first] != where.node[last])
    spreads = spread_load(_documents(rows, groups, across), edges, where, costs, recompute)
    seconds, held, sent = {}, {}, {}
    for kind, part in (("full", groups.select(~stay & ~across)), ("sparse", children)):
        pairs = part.pairs if kind == "full" else part.window_pairs
        compute, kept, inward, outward = _side(part, pairs, edges, where, costs)
        calls = _launches(part, world) + (_launches(groups.select(stay), world) if kind == "full" else 0)
        if kind == "full":
            compute, kept, calls = compute + spreads.pairs, kept + spreads.held, calls + spreads.calls
            inward, outward = inward + spreads.inward, outward + spreads.outward
        exchange, bytes_ = _exchange(inward, outward, costs, kind)
        launches = calls * passes.exchange * costs.cluster.launch_seconds
        seconds[kind] = compute * costs.attention_seconds(recompute) + launches
        seconds[f"{kind}_exchange"] = exchange * passes.exchange
        met = groups.select(~stay) if kind == "full" else part
        seconds[f"{kind}_latency"] = _latency(met, where, costs) * 2 * passes.exchange
        kept = kept / costs.held_heads
        held[kind] = kept * (layers[kind] > 0)
        times = layers[kind] * passes.exchange
        sent.update({site: (intra * times, inter * times) for site, (intra, inter) in bytes_.items()})
    if across.any():
        seconds["full_exchange"] += spreads.seconds
        sent["kv_exchange"] = (layers["full"] * spreads.intra, layers["full"] * spreads.inter)
    recurrent = tokens * costs.recurrence_seconds(recompute)
    if stay.any():
        keys = gather_keys(_gather_blocks(rows, groups.select(stay), edges, where), where, costs, recompute)
        seconds["full"] += keys.pairs * costs.attention_seconds(recompute)
        seconds["full_exchange"] += keys.seconds
        seconds["full_latency"] += keys.latency
        held["full"] += keys.held / costs.held_heads * (layers["full"] > 0)
        sent["kv_gather"] = (layers["full"] * keys.intra, layers["full"] * keys.inter)
    if costs.linear_layers:
        states = gather_states(children.child_first, children.child_width, where, costs, recompute)
        recurrent += states.seconds + states.latency
        sent["state_gather"] = (costs.linear_layers * states.intra, costs.linear_layers * states.inter)
    first, end = unions(groups.parent_first, groups.parent_width)
    return RoundLoad(
        full=seconds["full"],
        window=seconds["sparse"],
        linear=tokens * costs.layer_seconds(recompute),
        recurrent=recurrent,
        full_exchange=seconds["full_exchange"],
        sparse_exchange=seconds["sparse_exchange"],
        full_latency=seconds["full_latency"],
        sparse_latency=seconds["sparse_latency"],
        tokens=tokens,
        full_held=held["full"],
        sparse_held=held["sparse"],
        sent=sent,
        pack_first=first,
        pack_end=end,
        recompute=recompute,
    )


def _streams(rows: RoundTable, costs: Costs, world: int) -> tuple[_Groups, np.ndarray, np.ndarray]:
    """Groups, the shard edges of all child streams on one token axis, and the tokens of every rank."""
    keys = (rows.parent_first, rows.parent_width, rows.child_first, rows.child_width, rows.attention)
    changed = np.zeros(max(len(rows) - 1, 0), dtype=bool)
    for key in keys:
        changed |= key[1:] != key[:-1]
    starts = np.concatenate(([0], np.flatnonzero(changed) + 1)) if len(rows) else np.zeros(0, dtype=np.int64)
    parent_first, parent_width, child_first, child_width, attention = (key[starts] for key in keys)
    tokens = np.add.reduceat(rows.length, starts) if len(rows) else starts
    # Streams stand one after another on the axis, widest children first; canonical order inside a stream.
    order = np.lexsort((np.arange(len(starts)), child_first, -child_width))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(child_first[order]) != 0) | (np.diff(child_width[order]) != 0)
    high = np.empty_like(tokens)
    high[order] = np.cumsum(tokens[order])
    heads = order[new]
    stream_low = high[heads] - tokens[heads]
    stream_tokens = np.diff(np.append(stream_low, tokens.sum()))
    edges, edge_at, held = _cut(child_first[heads], child_width[heads], stream_low, stream_tokens, world)
    edge = np.empty_like(tokens)
    edge[order] = edge_at[np.cumsum(new) - 1]
    groups = _Groups(
        parent_first,
        parent_width,
        child_first,
        child_width,
        attention,
        np.add.reduceat(costs.pairs(rows.length), starts) if len(rows) else np.zeros(0),
        np.add.reduceat(costs.window_pairs(rows.length), starts) if len(rows) else np.zeros(0),
        tokens,
        high - tokens,
        high,
        edge,
    )
    return groups, edges, held


def _cut(
    first: np.ndarray, width: np.ndarray, low: np.ndarray, tokens: np.ndarray, world: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut streams (widest first) into shards: edges [sum of width + 1], each stream's first edge, tokens [world]."""
    edge_at = np.concatenate(([0], np.cumsum(width + 1)[:-1])) if len(width) else width
    edges = np.empty(int((width + 1).sum()), dtype=np.int64)
    held = np.zeros(world, dtype=np.int64)
    for each in np.unique(width)[::-1]:
        streams = np.flatnonzero(width == each)
        ranks = first[streams, None] + np.arange(each)
        base, extra = np.divmod(tokens[streams], each)
        sizes = np.repeat(base[:, None], each, axis=1)
        if each > 1:
            # The extra tokens go to the ranks with fewest tokens of wider blocks, ties to the lowest rank.
            poorest = np.argsort(held[ranks], axis=1, kind="stable")
            np.put_along_axis(sizes, poorest, base[:, None] + (np.arange(each) < extra[:, None]), axis=1)
        held[ranks] += sizes
        at = edge_at[streams, None] + np.arange(each + 1)
        edges[at] = low[streams, None] + np.concatenate(
            (np.zeros((len(streams), 1), np.int64), sizes.cumsum(1)), axis=1
        )
    return edges, edge_at, held


def _child_groups(groups: _Groups) -> _Groups:
    """The streams themselves as groups: what a sparse layer exchanges, with the child in the place of the parent."""
    key = groups.edge
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    count = len(first)
    low = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(low, index, groups.low)
    tokens = np.bincount(index, groups.tokens, count).astype(np.int64)
    return _Groups(
        groups.child_first[first],
        groups.child_width[first],
        groups.child_first[first],
        groups.child_width[first],
        np.zeros(count, dtype=np.int64),
        np.bincount(index, groups.pairs, count),
        np.bincount(index, groups.window_pairs, count),
        tokens,
        low,
        low + tokens,
        groups.edge[first],
    )


def _hold(groups: _Groups, edges: np.ndarray, where: Grid) -> _Held:
    """Tokens of each group on each rank of its parent (`own`), on that rank's node, and on other nodes."""
    group = np.repeat(np.arange(len(groups.tokens)), groups.parent_width)
    starts = np.cumsum(groups.parent_width) - groups.parent_width
    rank = groups.parent_first[group] + np.arange(len(group)) - starts[group]
    first, width, edge = groups.child_first[group], groups.child_width[group], groups.edge[group]
    low, high = groups.low[group], groups.high[group]

    def before(limit: np.ndarray) -> np.ndarray:
        """Axis position up to which the ranks below `limit` hold the group."""
        return np.clip(edges[edge + np.clip(limit - first, 0, width)], low, high)

    own = before(rank + 1) - before(rank)
    node = before(where.node_end[rank]) - before(where.node_first[rank])
    return _Held(group, rank, own, node, groups.tokens[group] - node)


def _documents(rows: RoundTable, groups: _Groups, across: np.ndarray) -> SpreadDocuments:
    """The documents of the groups `across`, with their place on the axis."""
    group = np.repeat(np.arange(len(groups.tokens)), _sizes(rows, groups))
    end = np.cumsum(rows.length)
    before = np.cumsum(groups.tokens) - groups.tokens
    at = groups.low[group] + end - rows.length - before[group]
    columns = (rows.length, rows.parent_first, rows.parent_width, rows.child_first, rows.child_width)
    return SpreadDocuments(*columns, at, groups.edge[group]).select(across[group])


def _sizes(rows: RoundTable, groups: _Groups) -> np.ndarray:
    """Placements of each group: groups are neighbours in canonical order."""
    edges = np.concatenate(([0], np.cumsum(groups.tokens)))
    return np.diff(np.searchsorted(np.concatenate(([0], np.cumsum(rows.length))), edges))


def _gather_blocks(
    rows: RoundTable, groups: _Groups, edges: np.ndarray, where: Grid
) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """The blocks of kv_gather documents, as `gather_keys` takes them."""
    held, blocks = _hold(groups, edges, where), {}
    for first, width in sorted(set(zip(groups.child_first.tolist(), groups.child_width.tolist(), strict=True))):
        mine = (groups.child_first[held.group] == first) & (groups.child_width[held.group] == width)
        own = np.bincount(held.rank[mine] - first, held.own[mine], width).astype(np.int64)
        inside = (rows.attention == KV_GATHER) & (rows.child_first == first) & (rows.child_width == width)
        blocks[first, width] = (rows.length[inside], own)
    return blocks


def _side(
    groups: _Groups, pairs: np.ndarray, edges: np.ndarray, where: Grid, costs: Costs
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One layer kind: pairs x head share, tokens x heads held, and tokens x heads of the exchange in and that out
    [4, world]: sent intra, sent inter, received intra, received inter."""
    world = len(where.node)
    held = _hold(groups, edges, where)
    queries, into, share, into_node, queries_node, into_all = _weights(groups, held, where, costs)

    def at_rank(values: np.ndarray) -> np.ndarray:
        return np.bincount(held.rank, values, world)

    compute = at_rank(pairs[held.group] * share)
    kept = at_rank(groups.tokens[held.group] * into)
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
        held.own * (costs.model.heads - queries_node),
    )
    return compute, kept, np.stack([at_rank(x) for x in inward]), np.stack([at_rank(x) for x in outward])


def _exchange(
    inward: np.ndarray, outward: np.ndarray, costs: Costs, kind: str
) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Seconds and bytes of one forward's two exchanges, from what `_side` says."""
    exchange = np.zeros(inward.shape[1])
    sent: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for site, parts in ((f"{kind}_in", inward), (f"{kind}_out", outward)):
        out_intra, out_inter, in_intra, in_inter = parts * costs.head_bytes
        intra = np.maximum(out_intra, in_intra) / costs.cluster.intra_rate
        inter = np.maximum(out_inter, in_inter) / costs.cluster.inter_rate
        exchange += np.maximum(intra, inter)
        sent[site] = (out_intra.astype(np.int64), out_inter.astype(np.int64))
    return exchange, sent


def _weights(
    groups: _Groups, held: _Held, where: Grid, costs: Costs
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per entry of `held`: query heads, Q+K+V heads, pair share; sums over the rank's node; sum over the block."""
    code = groups.attention * (len(where.node) + 1) + groups.parent_width
    kinds, index = np.unique(code, return_inverse=True)
    tables = [costs.weights(ATTENTIONS[k // (len(where.node) + 1)], int(k % (len(where.node) + 1))) for k in kinds]
    sizes = np.array([len(t.queries) + 1 for t in tables], dtype=np.int64)
    at = (np.cumsum(sizes) - sizes)[index][held.group]
    zero = np.zeros(1, dtype=np.int64)
    queries = np.concatenate([zero, *(np.append(t.queries, 0) for t in tables)])[1:]
    into = np.concatenate([zero, *(np.append(t.into, 0) for t in tables)])[1:]
    share = np.concatenate([zero, *(np.append(t.share, 0.0) for t in tables)])[1:]
    into_sum = np.concatenate([zero, np.cumsum(into)])
    queries_sum = np.concatenate([zero, np.cumsum(queries)])
    first, width = groups.parent_first[held.group], groups.parent_width[held.group]
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


def _launches(groups: _Groups, world: int) -> np.ndarray:
    """Attention calls of every rank in one pass: one a block of its own (blocks around a rank differ in width)."""
    blocks = np.unique(groups.parent_first * (world + 1) + groups.parent_width)
    first, width = np.divmod(blocks, world + 1)
    return spread(first, first + width, world)


def _latency(groups: _Groups, where: Grid, costs: Costs) -> np.ndarray:
    """Seconds of one collective on every rank's component: 0 alone, by scope elsewhere."""
    out = np.zeros(len(where.node))
    first, end = unions(groups.parent_first, groups.parent_width)
    for a, b in zip(first.tolist(), end.tolist(), strict=True):
        if b - a > 1:
            out[a:b] = costs.latency(crosses=bool(where.node[a] != where.node[b - 1]))
    return out
