"""What one placement adds to the ranks of its parent, as coefficients: the local search's view of the cost model.

Loads of a round are sums of such additions, so a move is a subtraction and an addition. Two simplifications against
`load` (which judges the result): a sample lies evenly on its child's ranks, not where the child's stream puts it, and
the in and out exchange of a layer are taken together, tokens' side against heads' side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from raypack.cost.rates import PASSES
from raypack.exchange.asks import Addition
from raypack.layers.costs import Costs
from raypack.plan.topology import Block, Topology

TOKENS, FULL_HELD, SPARSE_HELD, FULL, CHEAP, EXCHANGE, CHILDREN = 0, 1, 2, 3, 4, slice(5, 9), 9
ROWS = 10
"""Rows of a load: three memory rows (tokens of a rank), full seconds, cheap seconds, exchange seconds of full layers
(tokens' and heads' side, intra, then inter), and children of two ranks or more (a count; crossing ones x CROSSING)."""

CROSSING = 2.0**20


@dataclass(frozen=True, eq=False)
class PairList:
    """All (parent, child) blocks of one shape, by child in rank order.

    Attributes:
        parent_first, child_first: int64 [pairs].
        profile: index into `stack` of each pair.
        stack: float64 [profiles, amounts, ROWS, parent width]: a row for each of `Costs.amounts`.
    """

    parent_width: int
    child_width: int
    parent_first: np.ndarray
    child_first: np.ndarray
    profile: np.ndarray
    stack: np.ndarray

    def additions(self, amounts: np.ndarray) -> np.ndarray:
        """Loads of a sample with these `Costs.amounts`: [profiles, ROWS, parent width]."""
        return np.einsum("a,parw->prw", amounts, self.stack)


def pair_list(
    topology: Topology, costs: Costs, recompute: str, parent_width: int, child_width: int, attention: str
) -> PairList:
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
            stack.append(profile(topology, costs, recompute, parent, child, attention))
        rows.append((parent.first, child.first, known[key]))
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
    return PairList(parent_width, child_width, columns[0], columns[1], columns[2], np.array(stack))


def node_cuts(topology: Topology, block: Block) -> tuple[int, ...]:
    """Where nodes begin inside the block, counted from its first rank."""
    first, last = topology.node_of[block.first], topology.node_of[block.end - 1]
    return tuple(topology.node_firsts[node] - block.first for node in range(first + 1, last + 1))


@dataclass(frozen=True, eq=False)
class LayersAdded:
    """What all layers of one kind add to the ranks of their block by one placement, all passes of a step.

    Attributes:
        amount: index of the kind's pairs in `Costs.amounts`.
        at_parent: whether the block is the parent.
        seconds: of a pair: float64 [width].
        held: share of a token's heads in memory: float64 [width].
        rate: seconds of a head of a token that is moved, by side: float64 [4, 1].
    """

    amount: int
    at_parent: bool
    seconds: np.ndarray
    held: np.ndarray
    rate: np.ndarray
    added: Addition


def layers_added(
    topology: Topology, costs: Costs, recompute: str, parent: Block, child: Block, attention: str
) -> Iterator[LayersAdded]:
    """One entry a layer kind that holds or moves something; `attention` = how parents compute."""
    scale = costs.head_bytes * PASSES[recompute].exchange / costs.scope_rates[:, None]
    for number, layer in enumerate(costs.layers, start=1):
        added = layer.kind.costing.addition(layer, topology, parent, child, attention)
        if added is not None:
            seconds = layer.count * layer.attention_seconds(recompute) * added.share
            held, at_parent = added.held / costs.held_heads, layer.kind.at == "parent"
            yield LayersAdded(number, at_parent, seconds, held, layer.count * scale, added)


def profile(
    topology: Topology, costs: Costs, recompute: str, parent: Block, child: Block, attention: str
) -> np.ndarray:
    """float64 [amounts, ROWS, parent width], `attention` = how parents compute."""
    per_token, per_sample = 0, -1
    inside = slice(child.first - parent.first, child.end - parent.first)
    out = np.zeros((len(costs.layers) + 2, ROWS, parent.width))
    out[per_token, TOKENS, inside] = 1 / child.width
    out[per_token, CHEAP, inside] = costs.token_seconds(recompute) / child.width
    for each in layers_added(topology, costs, recompute, parent, child, attention):
        moving = each.rate * (each.added.inward + each.added.outward)
        if each.at_parent:
            out[each.amount, FULL] = each.seconds
            out[per_token, FULL_HELD] = np.maximum(out[per_token, FULL_HELD], each.held)
            out[per_token, EXCHANGE] += moving
        else:
            out[each.amount, CHEAP, inside] = each.seconds
            out[per_token, SPARSE_HELD, inside] = np.maximum(out[per_token, SPARSE_HELD, inside], each.held)
            out[per_token, CHEAP, inside] += moving.max(axis=0)
    if child.width > 1:
        out[per_sample, CHILDREN, inside] = 1.0 if topology.in_one_node(child) else CROSSING
    return out
