"""What one placement adds to the ranks of its parent, as coefficients: the local search's view of the cost model.

Loads of a round are sums of such additions, so a move is a subtraction and an addition. Two simplifications against
`load` (which judges the result): a sample lies evenly on its child's ranks, not where the child's stream puts it, and
the in and out exchange of a layer are taken together, tokens' side against heads' side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.cost.costs import PASSES, Costs
from raypack.plan.grid import grid
from raypack.plan.topology import Block, Topology

TOKENS, FULL_HELD, SPARSE_HELD, FULL, CHEAP, EXCHANGE, CHILDREN = 0, 1, 2, 3, 4, slice(5, 9), 9
ROWS = 10
"""Rows of a load: three memory rows (tokens of a rank), full seconds, cheap seconds, exchange seconds of full layers
(tokens' and heads' side, intra, then inter), and children of two ranks or more (a count; crossing ones x CROSSING)."""

CROSSING = 2.0**20
PER_TOKEN, PER_PAIR, PER_WINDOW_PAIR, PER_SAMPLE = range(4)


@dataclass(frozen=True, eq=False)
class PairList:
    """All (parent, child) blocks of one shape, by child in rank order.

    Attributes:
        parent_first, child_first: int64 [pairs].
        profile: index into `stack` of each pair.
        stack: float64 [profiles, 4, ROWS, parent width]: per token, pair, window pair and sample.
    """

    parent_width: int
    child_width: int
    parent_first: np.ndarray
    child_first: np.ndarray
    profile: np.ndarray
    stack: np.ndarray

    def additions(self, amounts: np.ndarray) -> np.ndarray:
        """Loads of a sample with (tokens, pairs, window pairs, 1) `amounts`: [profiles, ROWS, parent width]."""
        return np.einsum("a,parw->prw", amounts, self.stack)


def pair_list(topology: Topology, costs: Costs, recompute: str, parent_width: int, child_width: int) -> PairList:
    """Pairs of a shape; blocks that lie alike across nodes share a profile."""
    parents = topology.blocks_of_width(parent_width)
    parent_at, stack, rows = 0, list[np.ndarray](), list[tuple[int, int, int]]()
    known: dict[tuple[tuple[int, ...], int], int] = {}
    for child in topology.blocks_of_width(child_width):
        while parent_at < len(parents) and parents[parent_at].end <= child.first:
            parent_at += 1
        if parent_at == len(parents):
            break
        parent = parents[parent_at]
        if not parent.contains(child):
            continue
        key = (node_cuts(topology, parent), child.first - parent.first)
        if key not in known:
            known[key] = len(stack)
            stack.append(profile(topology, costs, recompute, parent, child))
        rows.append((parent.first, child.first, known[key]))
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
    return PairList(parent_width, child_width, columns[0], columns[1], columns[2], np.array(stack))


def node_cuts(topology: Topology, block: Block) -> tuple[int, ...]:
    """Where nodes begin inside the block, counted from its first rank."""
    first, last = topology.node_of[block.first], topology.node_of[block.end - 1]
    return tuple(topology.node_firsts[node] - block.first for node in range(first + 1, last + 1))


def profile(topology: Topology, costs: Costs, recompute: str, parent: Block, child: Block) -> np.ndarray:
    """float64 [4, ROWS, parent width]."""
    passes, cluster = PASSES[recompute], costs.cluster
    attention = costs.attention_seconds(recompute)
    inside = slice(child.first - parent.first, child.end - parent.first)
    above, below = costs.weights("ulysses", parent.width), costs.weights("ulysses", child.width)
    rates = np.array([cluster.intra_rate, cluster.intra_rate, cluster.inter_rate, cluster.inter_rate])
    out = np.zeros((4, ROWS, parent.width))
    out[PER_TOKEN, TOKENS, inside] = 1 / child.width
    out[PER_TOKEN, FULL_HELD] = above.into / costs.held_heads * (costs.full_layers > 0)
    out[PER_TOKEN, SPARSE_HELD, inside] = below.into / costs.held_heads * (costs.sparse_layers > 0)
    out[PER_PAIR, FULL] = costs.full_layers * attention * above.share
    scale = costs.head_bytes * passes.exchange / rates[:, None]
    out[PER_TOKEN, EXCHANGE] = costs.full_layers * scale * sides(topology, parent, child, above.into + above.queries)
    sparse = (costs.sparse_layers * scale * sides(topology, child, child, below.into + below.queries)).max(axis=0)
    out[PER_TOKEN, CHEAP, inside] = costs.token_seconds(recompute) / child.width + sparse
    out[PER_WINDOW_PAIR, CHEAP, inside] = costs.sparse_layers * attention * below.share
    if child.width > 1:
        out[PER_SAMPLE, CHILDREN, inside] = 1.0 if topology.in_one_node(child) else CROSSING
    return out


def sides(topology: Topology, block: Block, child: Block, heads: np.ndarray) -> np.ndarray:
    """Heads a token that every rank of `block` moves in a layer's exchange of `heads` [width] a rank: [4, width].

    Tokens' side intra, heads' side intra, tokens' side inter, heads' side inter. The exchange in moves Q, K and V, the
    one out moves queries; for both together `heads` is their sum.
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
