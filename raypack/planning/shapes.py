"""The choices for one sample alone: a parent width and a child width, with what they cost as functions of its length.

Seconds, area and memory of a length n are sums of a few coefficients times n, the pairs of each layer kind, and 1, so a
whole table (lengths x shapes) is one matrix product. Planner and bounds read the same table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raypack.cost.rates import PASSES
from raypack.exchange.asks import Floor
from raypack.exchange.heads.cost import weights_of
from raypack.layers.costs import Costs
from raypack.plan.topology import Block, Topology

MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights v of intra against inter seconds in the area bound."""


@dataclass(frozen=True)
class Shapes:
    """Arrays [shapes], ordered by (parent width, child width) ascending.

    Attributes:
        parent, child: widths.
        local: whether the child is inside one node.
        pair: seconds a pair of each of `costs.layers` (its largest share of a rank): [layers, shapes].
        linear: seconds a token, exchanges left out.
        full_exchange, sparse_exchange: least seconds a token, largest rank, all layers and passes; of kinds at the
            parent, at the child.
        latency: seconds of the collectives of one round.
        intra, inter: seconds of rate a token, bytes sent by all ranks together.
        full_held, sparse_held: share of the sample's heads on the rank that holds most (memory).
        padded: whether F layers hold a sample as if all shards were as long as the longest (kv_gather).
    """

    parent: np.ndarray
    child: np.ndarray
    local: np.ndarray
    pair: np.ndarray
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
        chosen: dict[str, Any] = {k: v[..., mask] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **chosen)

    def index(self, parent: int, child: int) -> int:
        return int(np.flatnonzero((self.parent == parent) & (self.child == child))[0])

    def full_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """What parents compute, on the busiest rank: [lengths, shapes]."""
        return self._pair_seconds(lengths, self.costs.at_parent)

    def _pair_seconds(self, lengths: np.ndarray, layers: tuple[int, ...]) -> np.ndarray:
        found = np.zeros((len(lengths), len(self)))
        for i in layers:
            found = found + np.outer(self.costs.layers[i].pairs(lengths), self.pair[i])
        return found

    def cheap_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Everything else on the busiest rank, sparse exchanges included: [lengths, shapes]."""
        window = self._pair_seconds(lengths, self.costs.at_child)
        # Shards differ by a token, so a rank is sure to hold only the whole part of its share.
        shard = lengths[:, None] // self.child[None, :]
        return window + shard * self.linear + np.outer(lengths, self.sparse_exchange)

    def seconds(self, lengths: np.ndarray) -> np.ndarray:
        """The sample alone: [lengths, shapes]. No plan runs it in less."""
        exchange = np.outer(lengths, self.full_exchange) + self.latency
        return self.full_seconds(lengths) + self.cheap_seconds(lengths) + exchange

    def work(self, lengths: np.ndarray) -> np.ndarray:
        """Compute seconds summed over ranks, no communication, no rounding up of heads: [lengths]."""
        work = np.zeros(len(lengths))
        for layer in self.costs.layers:
            work = work + layer.pairs(lengths) * layer.count * layer.attention_seconds(self.recompute)
        return work + lengths * self.linear[0]

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
    rows, pairs = [], []
    for (parent, child), blocks in sorted(variants(topology, costs).items()):
        found = [
            _coefficients(topology, costs, recompute, *pair, kind)
            for pair in blocks
            for kind in _kinds(topology, *pair)
            if attention in (kind, "auto")
        ]
        if found:
            rows.append((parent, child, *np.min([each for each, _ in found], axis=0)))
            pairs.append(np.min([each for _, each in found], axis=0))
    parent, child, crosses, *columns = np.array(rows, dtype=np.float64).T
    return Shapes(
        parent=parent.astype(np.int64),
        child=child.astype(np.int64),
        local=crosses == 0,
        pair=np.array(pairs).reshape(len(rows), len(costs.layers)).T,
        costs=costs,
        recompute=recompute,
        padded=attention == "kv_gather",
        **dict(zip(COEFFICIENTS, columns, strict=True)),
    )


COEFFICIENTS = (
    "linear",
    "full_exchange",
    "sparse_exchange",
    "latency",
    "intra",
    "inter",
    "full_held",
    "sparse_held",
)
"""Fields of `Shapes` that `_coefficients` gives, in order."""


def _coefficients(
    topology: Topology, costs: Costs, recompute: str, parent: Block, child: Block, attention: str
) -> tuple[tuple[float, ...], list[float]]:
    """Whether the child crosses nodes (0 or 1), then COEFFICIENTS in order; and seconds a pair of each layer kind.

    Every coefficient holds for all blocks of its widths and for every plan around the sample: whatever else shares its
    child's stream, and wherever in the stream it lies (`exchange.heads.cost.floor` says how).
    """
    passes, crosses = PASSES[recompute].exchange, not topology.in_one_node(child)
    linear, latency, pairs = costs.token_seconds(recompute), 0.0, []
    sums = {"parent": _Sum(), "child": _Sum()}
    for layer in costs.layers:
        floor, beyond = layer.kind.costing.floor(layer, topology, parent, child, attention, recompute)
        block = parent if layer.kind.at == "parent" else child
        sums[layer.kind.at].add(floor, layer.count * passes)
        pairs.append(layer.count * layer.attention_seconds(recompute) * floor.share)
        if floor.calls:
            least = costs.least_latency(not topology.in_one_node(block))
            latency += floor.calls * (layer.count * passes) * least
        latency += layer.count * beyond
    full, sparse = sums["parent"], sums["child"]
    even = linear >= full.slope + sparse.slope
    return (
        float(crosses),
        linear,
        full.even if even else full.anywhere,
        sparse.even if even else sparse.anywhere,
        latency,
        full.intra + sparse.intra,
        full.inter + sparse.inter,
        full.held / costs.held_heads,
        sparse.held / costs.held_heads,
    ), pairs


@dataclass
class _Sum:
    """Floors of all layers of the kinds at one block, all passes of a step; `held` is the most of one layer."""

    even: float = 0.0
    anywhere: float = 0.0
    slope: float = 0.0
    intra: float = 0.0
    inter: float = 0.0
    held: float = 0.0

    def add(self, floor: Floor, times: int) -> None:
        self.even += times * floor.even
        self.anywhere += times * floor.anywhere
        self.slope += times * floor.slope
        self.intra += times * floor.intra
        self.inter += times * floor.inter
        self.held = max(self.held, floor.held)


def _kinds(topology: Topology, parent: Block, child: Block) -> tuple[str, ...]:
    """The attentions that are possible; on one rank they are all the same."""
    gathers = ("kv_gather",) if parent == child else ()
    spreads = ("hsap",) if len(set(topology.node_sizes(parent))) == 1 else ()
    return ("ulysses", *gathers, *spreads)


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
        weights = weights_of(costs, width)
        profiles: dict[tuple[int, ...], Block] = {}
        for parent in topology.blocks_of_width(width):
            profiles.setdefault(topology.node_sizes(parent), parent)
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
