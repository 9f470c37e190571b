"""The choices for one sample alone: a parent width and a child width, with what they cost as functions of its length.

Seconds, area and memory of a length n are sums of a few coefficients times pairs(n), window_pairs(n), n and 1, so a
whole table (lengths x shapes) is one matrix product. Planner and bounds read the same table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from raypack.parallel.topology import Block, Topology
from raypack.planning.cost import PASSES, Costs
from raypack.planning.grid import grid

MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights v of intra against inter seconds in the area bound."""

COEFFICIENTS = (
    "full",
    "window",
    "linear",
    "full_exchange",
    "sparse_exchange",
    "latency",
    "intra",
    "inter",
    "full_held",
    "sparse_held",
)


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
        return window + np.outer(lengths, self.linear / self.child + self.sparse_exchange)

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
        held = np.outer(lengths, np.maximum(self.full_held, self.sparse_held))
        return np.maximum(tokens, held)

    def fits(self, lengths: np.ndarray) -> np.ndarray:
        """Whether the sample alone keeps both memory limits: bool [lengths, shapes]."""
        return self.need(lengths) <= self.costs.cluster.rank_tokens_max


def shapes(topology: Topology, costs: Costs, recompute: str = "none") -> Shapes:
    """All legal (parent width, child width) of a topology.

    Where blocks of one width lie differently across nodes, each coefficient is the least over them, so that tables
    stay a floor.
    """
    rows = [
        (parent, child, *np.min([_coefficients(topology, costs, recompute, *pair) for pair in pairs], axis=0))
        for (parent, child), pairs in sorted(_variants(topology, costs).items())
    ]
    parent, child, crosses, *coefficients = np.array(rows, dtype=np.float64).T
    return Shapes(
        parent=parent.astype(np.int64),
        child=child.astype(np.int64),
        local=crosses == 0,
        costs=costs,
        recompute=recompute,
        **dict(zip(COEFFICIENTS, coefficients, strict=True)),
    )


def _variants(topology: Topology, costs: Costs) -> dict[tuple[int, int], list[tuple[Block, Block]]]:
    """(parent width, child width) -> blocks of these widths that differ in what their nodes hold of a sample."""
    of_node: dict[int, list[Block]] = {}
    across: list[Block] = []
    for block in topology.blocks:
        if topology.in_one_node(block):
            of_node.setdefault(topology.node_of[block.first], []).append(block)
        else:
            across.append(block)
    found: dict[tuple[int, int], list[tuple[Block, Block]]] = {}
    for width in topology.widths:
        weights = costs.weights("ulysses", width)
        profiles: dict[tuple[int, ...], Block] = {}
        for parent in topology.blocks_of_width(width):
            profiles.setdefault(_node_sizes(topology, parent), parent)
        for parent in profiles.values():
            first_node, last_node = topology.node_of[parent.first], topology.node_of[parent.end - 1]
            kinds: dict[int, tuple[bytes, ...]] = {}
            for node in range(first_node, last_node + 1):
                low = max(topology.node_firsts[node] - parent.first, 0)
                mine = slice(low, min(low + topology.nodes[node], parent.width))
                kinds[node] = (weights.queries[mine].tobytes(), weights.copied[mine].tobytes())
            nodes = {kind: node for node, kind in reversed(kinds.items())}.values()
            inner = [block for node in nodes for block in of_node[node]]
            seen = set()
            for child in filter(parent.contains, (*inner, *across)):
                mine = slice(child.first - parent.first, child.end - parent.first)
                held = (weights.queries[mine].tobytes(), weights.copied[mine].tobytes())
                key = (held, tuple(kinds[n] for n in _nodes(topology, child)))
                if key not in seen:
                    seen.add(key)
                    found.setdefault((parent.width, child.width), []).append((parent, child))
    return found


def _nodes(topology: Topology, block: Block) -> range:
    return range(topology.node_of[block.first], topology.node_of[block.end - 1] + 1)


def _node_sizes(topology: Topology, block: Block) -> tuple[int, ...]:
    nodes = _nodes(topology, block)
    return (block.width,) if len(nodes) == 1 else tuple(topology.nodes[n] for n in nodes)


def _coefficients(topology: Topology, costs: Costs, recompute: str, parent: Block, child: Block) -> tuple[float, ...]:
    """Crosses nodes (0/1), then COEFFICIENTS in order."""
    passes = PASSES[recompute]
    attention = costs.attention_seconds(recompute)
    crosses = not topology.in_one_node(child)
    above, below = costs.weights("ulysses", parent.width), costs.weights("ulysses", child.width)
    times_full = costs.full_layers * passes.exchange
    times_sparse = costs.sparse_layers * passes.exchange
    full_exchange, full_intra, full_inter = _exchange_floor(topology, costs, parent, child)
    sparse_exchange, sparse_intra, sparse_inter = _exchange_floor(topology, costs, child, child)
    latency = 0.0
    if parent.width > 1:
        latency += 2 * times_full * _least_latency(costs, not topology.in_one_node(parent))
    if child.width > 1:
        latency += 2 * times_sparse * _least_latency(costs, crosses)
    return (
        float(crosses),
        costs.full_layers * attention * float(above.share.max()),
        costs.sparse_layers * attention * float(below.share.max()),
        len(costs.model.kinds) * costs.layer_seconds(recompute),
        times_full * full_exchange,
        times_sparse * sparse_exchange,
        latency,
        times_full * full_intra + times_sparse * sparse_intra,
        times_full * full_inter + times_sparse * sparse_inter,
        float(above.into.max()) / costs.held_heads,
        float(below.into.max()) / costs.held_heads,
    )


def _least_latency(costs: Costs, crosses: bool) -> float:
    """A wider component may have the latency of the other scope, so the floor takes the lesser where both can be."""
    return costs.latency(True) if crosses else min(costs.latency(True), costs.latency(False))


def _exchange_floor(topology: Topology, costs: Costs, block: Block, child: Block) -> tuple[float, float, float]:
    """In plus out exchange of one layer forward, per token: (seconds of the busiest rank, intra, inter rank-seconds).

    Floors over every way to cut the child's stream: a sample may lie on any of the child's shards in any proportion.
    """
    cluster, weights = costs.cluster, costs.weights("ulysses", block.width)
    where = grid(topology)
    node = where.node[block.first : block.end]
    inside = np.zeros(block.width, dtype=bool)
    inside[child.first - block.first : child.end - block.first] = True
    busiest = intra = inter = 0.0
    for heads in (weights.into, weights.queries):
        total = float(heads.sum())
        on_node = np.bincount(node - node[0], heads).astype(np.float64)[node - node[0]]
        sends_intra = (on_node - heads)[inside]
        sends_inter = (total - on_node)[inside]
        intra += float(sends_intra.min()) * costs.head_bytes / cluster.intra_rate
        inter += float(sends_inter.min()) * costs.head_bytes / cluster.inter_rate
        # The average sender is a floor for the busiest; a receiver outside the child gets all of its heads.
        child_nodes = set(node[inside].tolist())
        apart = np.array([n not in child_nodes for n in node.tolist()], dtype=bool)
        near = ~inside & ~apart & (len(child_nodes) == 1)
        floors = [
            float(sends_intra.min()) / child.width / cluster.intra_rate,
            float(sends_inter.min()) / child.width / cluster.inter_rate,
            float(heads[apart].max(initial=0)) / cluster.inter_rate,
            float(heads[near].max(initial=0)) / cluster.intra_rate,
        ]
        busiest += max(floors) * costs.head_bytes
    return busiest, intra, inter
