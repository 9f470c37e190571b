"""What a sample of one shape costs at the very least, as coefficients: the numbers behind `Shapes` and the bounds.

Every coefficient holds for all blocks of its widths and for every plan around the sample: whatever else shares its
child's stream, and wherever in the stream it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.cost.costs import PASSES, Costs
from raypack.exchange.lasp2.cost import gather_states
from raypack.plan.grid import grid
from raypack.plan.topology import Block, Topology

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
"""Fields of `Shapes` that `coefficients` gives, in order."""


def variants(topology: Topology, costs: Costs) -> dict[tuple[int, int], list[tuple[Block, Block]]]:
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


def coefficients(
    topology: Topology, costs: Costs, recompute: str, parent: Block, child: Block, attention: str = "ulysses"
) -> tuple[float, ...]:
    """Whether the child crosses nodes (0 or 1), then COEFFICIENTS in order; `attention`: of full layers.

    Tokens' shards and what receivers get hang together. If a rank of the child holds a share m of the sample, the whole
    stream is so long that every rank of the child computes at least m x n tokens; against that, a receiver gets up to m
    x (ranks of its node) fewer tokens. Where a token computes longer than it travels (`slope`), lying evenly is best,
    and receivers' floors are those of even shards; else only receivers outside the child count.

    With kv_gather the stream may put the document on any of the ranks: the busiest computes at least its even share.
    With hsap over nodes, at home whatever the plan holds besides, the document may move nothing; the busiest node
    computes at least its even share.
    """
    passes = PASSES[recompute]
    pair_seconds = costs.attention_seconds(recompute)
    gather, nodes = attention == "kv_gather", len(topology.node_sizes(parent))
    crosses = not topology.in_one_node(child)
    above, below = costs.weights("ulysses", parent.width), costs.weights("ulysses", child.width)
    share, held = float(above.share.max()), float(above.into.max())
    if gather:
        share, held = 1 / parent.width, 2 * costs.model.kv_heads + costs.model.heads / parent.width
    if attention == "hsap" and nodes > 1:
        on_node = costs.weights("hsap", parent.width // nodes)
        share, held = float(on_node.share.max()) / nodes, float(on_node.into.max()) / nodes
    times_full = costs.full_layers * passes.exchange
    times_sparse = costs.sparse_layers * passes.exchange
    linear = costs.token_seconds(recompute)
    full = _keys_floor(topology, costs, parent) if gather else _floor(topology, costs, parent, child)
    full = _Floor(0.0, 0.0, 0.0, 0.0, 0.0) if attention == "hsap" and nodes > 1 else full
    sparse = _floor(topology, costs, child, child)
    even = linear >= times_full * full.slope + times_sparse * sparse.slope
    latency = 0.0
    if parent.width > 1:
        latency += (1 if gather else 2) * times_full * _least_latency(costs, not topology.in_one_node(parent))
    if child.width > 1:
        latency += 2 * times_sparse * _least_latency(costs, crosses)
        latency += costs.linear_layers * passes.exchange * costs.state_calls * _least_latency(costs, crosses)
        latency += costs.linear_layers * _state_seconds(topology, costs, recompute, child)
    return (
        float(crosses),
        costs.full_layers * pair_seconds * share,
        costs.sparse_layers * pair_seconds * float(below.share.max()),
        linear,
        times_full * (full.even if even else full.any),
        times_sparse * (sparse.even if even else sparse.any),
        latency,
        times_full * full.intra + times_sparse * sparse.intra,
        times_full * full.inter + times_sparse * sparse.inter,
        held / costs.held_heads * (costs.full_layers > 0),
        float(below.into.max()) / costs.held_heads * (costs.sparse_layers > 0),
    )


def _state_seconds(topology: Topology, costs: Costs, recompute: str, child: Block) -> float:
    """Seconds of the bytes of one L layer's states on the child's busiest rank: a wider component only sends more."""
    states = gather_states(np.array([child.first]), np.array([child.width]), grid(topology), costs, recompute)
    return float(states.seconds.max())


def _least_latency(costs: Costs, crosses: bool) -> float:
    """A wider component may have the latency of the other scope, so the floor takes the lesser where both can be."""
    return costs.latency(True) if crosses else min(costs.latency(True), costs.latency(False))


@dataclass(frozen=True)
class _Floor:
    """In plus out exchange of one layer forward, seconds per token.

    Attributes:
        even: of the busiest rank, where the sample lies evenly on its child.
        any: the same, wherever it lies in the child.
        slope: how fast `even` can fall with the largest share of a rank.
        intra, inter: bytes sent by all ranks together over the rate.
    """

    even: float
    any: float
    slope: float
    intra: float
    inter: float


def _floor(topology: Topology, costs: Costs, block: Block, child: Block) -> _Floor:
    cluster, weights = costs.cluster, costs.weights("ulysses", block.width)
    node = grid(topology).node[block.first : block.end]
    inside = np.zeros(block.width, dtype=bool)
    inside[child.first - block.first : child.end - block.first] = True
    mates = np.bincount(node - node[0], inside)[node - node[0]]
    apart, local = mates == 0, len(np.unique(node[inside])) == 1
    even = least = slope = intra = inter = 0.0
    for heads in (weights.into, weights.queries):
        scale = costs.head_bytes
        on_node = np.bincount(node - node[0], heads)[node - node[0]]
        # The average rank of the child is a floor for the busiest sender, wherever the tokens lie.
        sends_intra = float((on_node - heads)[inside].min()) * scale / cluster.intra_rate
        sends_inter = float((heads.sum() - on_node)[inside].min()) * scale / cluster.inter_rate
        gets_inter = heads * (1 - mates / child.width) * scale / cluster.inter_rate
        gets_intra = heads * ((mates - inside) / child.width) * scale / cluster.intra_rate
        sends = max(sends_intra, sends_inter) / child.width
        outside = max(gets_inter[apart].max(initial=0.0), gets_intra[~inside & local].max(initial=0.0))
        even += max(sends, float(gets_inter.max()), float(gets_intra.max()))
        least += max(sends, float(outside))
        slope += float((heads * mates).max()) * scale / min(cluster.inter_rate, cluster.intra_rate)
        intra += sends_intra
        inter += sends_inter
    return _Floor(even, least, slope, intra, inter)


def _keys_floor(topology: Topology, costs: Costs, block: Block) -> _Floor:
    """The gather of K and V over a block: padding only adds to what the tokens themselves send."""
    node = grid(topology).node[block.first : block.end]
    near = np.bincount(node - node[0])[node - node[0]]
    size = 2 * costs.model.kv_heads * costs.head_bytes
    intra = float((near - 1).min()) * size / costs.cluster.intra_rate
    inter = float((block.width - near).min()) * size / costs.cluster.inter_rate
    least = max(intra, inter) / block.width
    return _Floor(least, least, 0.0, intra, inter)
