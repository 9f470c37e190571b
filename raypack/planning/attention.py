"""Which full attention a placement gets where that is free to choose, or forced.

Heads of a parent over nodes are either exchanged over all its ranks (ulysses) or split inside each node, with the
document's segments over the nodes (hsap), which also puts ranks beyond the head count to work. Where the parent is the
child, K and V may be gathered instead.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raypack.errors import RaypackError
from raypack.exchange.heads.cost import weights_of
from raypack.plan.names import HSAP, KV_GATHER, ULYSSES
from raypack.plan.table import Table
from raypack.plan.topology import Block, Topology
from raypack.planning.load import load_rounds
from raypack.planning.problem import Problem


def gather_where_cheaper(problem: Problem, table: Table) -> Table:
    """`table` with K and V gathered, block width by block width, wherever that makes the step shorter.

    Only samples whose parent is their child can gather. Documents of one block are switched together: they share its
    gather, and alone each would pad it for the rest.
    """
    best, seconds = table, problem.judge(table)
    free = (table.parent_width > 1) & (table.parent_width == table.child_width)
    for width in np.unique(table.parent_width[free])[::-1].tolist():
        mine = free & (table.parent_width == width)
        changed = replace(best, attention=np.where(mine, KV_GATHER, best.attention))
        value = problem.judge(changed)
        if value < seconds:
            best, seconds = changed, value
    return best


SHARES = (1.0, 0.5, 0.25, 0.1)
"""Shares of the samples of one parent width, longest first, that are tried as hsap."""

LONGEST = 8
"""Samples whose parent is tried at every wider block."""

WORTH = 0.25
"""Only those whose full attention takes at least this share of the step."""


def check_even(topology: Topology) -> None:
    """Raises RaypackError, naming the nodes, where their sizes rule out hsap."""
    if len(set(topology.nodes)) > 1:
        named = ", ".join(f"node {node} has {size} ranks" for node, size in enumerate(topology.nodes))
        raise RaypackError(f"attention = 'hsap' needs nodes of equal size, but {named}; use auto or ulysses")


def spread_everywhere(problem: Problem, table: Table) -> Table:
    """`table` with hsap for every parent over nodes, and parents widened where that makes the step shorter.

    A node may attend for more than its even share of a document's tokens, so a round that keeps the cap by heads may
    exceed it: such rounds stay as they are.
    """
    spread = replace(table, attention=np.where(_can_spread(problem.topology, table), HSAP, table.attention))
    loads = load_rounds(spread, problem.topology, problem.costs)
    kept = np.array([problem.keeps_cap(load) for load in loads])
    spread = replace(spread, attention=np.where(kept[spread.round], spread.attention, table.attention))
    return _widen(problem, spread, problem.judge(spread))


def spread_where_cheaper(problem: Problem, table: Table) -> Table:
    """`table` with hsap, parent width by parent width, for the longest samples where that makes the step shorter."""
    best, seconds = table, problem.judge(table)
    free = _can_spread(problem.topology, table) & (table.attention == ULYSSES)
    for width in np.unique(table.parent_width[free])[::-1].tolist():
        rows = np.flatnonzero(free & (table.parent_width == width))
        rows = rows[np.argsort(-table.samples.lengths[rows], kind="stable")]
        start = best
        for share in SHARES:
            attention = start.attention.copy()
            attention[rows[: int(np.ceil(share * len(rows)))]] = HSAP
            changed = replace(start, attention=attention)
            if (value := problem.judge(changed)) < seconds:
                best, seconds = changed, value
    return _widen(problem, best, seconds)


def _widen(problem: Problem, table: Table, seconds: float) -> Table:
    """Give the longest samples a wider parent with hsap, one after the other, wherever the step gets shorter."""
    best, tries = table, problem.budget
    longest = np.argsort(-table.samples.lengths, kind="stable")[:LONGEST]
    full = _full_seconds(problem, table)
    for row in longest[full[longest] >= WORTH * seconds].tolist():
        parent = Block(int(table.parent_first[row]), int(table.parent_width[row]))
        start = best
        for block in problem.topology.blocks_around(parent.first)[::-1]:
            if tries <= 0:
                return best
            if block.width <= parent.width or not _is_even(problem.topology, block):
                continue
            tries -= 1
            changed = replace(
                start,
                parent_first=_with(start.parent_first, row, block.first),
                parent_width=_with(start.parent_width, row, block.width),
                attention=_with(start.attention, row, HSAP),
            )
            if (value := problem.judge(changed)) < seconds:
                best, seconds = changed, value
    return best


def _full_seconds(problem: Problem, table: Table) -> np.ndarray:
    """Full attention of every sample on the busiest rank of its parent, at least."""
    costs, widths = problem.costs, table.parent_width
    largest = {width: float(weights_of(costs, width).share.max()) for width in set(widths.tolist())}
    shares = np.array([largest[width] for width in widths.tolist()])
    shares = np.where(table.attention == ULYSSES, shares, 1 / widths)
    found = np.zeros(len(widths))
    for i in costs.at_parent:
        layer = costs.layers[i]
        found += layer.count * layer.attention_seconds(problem.recompute) * layer.pairs(table.samples.lengths) * shares
    return found


def _with(column: np.ndarray, row: int, value: int) -> np.ndarray:
    column = column.copy()
    column[row] = value
    return column


def _can_spread(topology: Topology, table: Table) -> np.ndarray:
    """Rows whose parent spans nodes of one size."""
    parents = list(zip(table.parent_first.tolist(), table.parent_width.tolist(), strict=True))
    even = {pair: _is_even(topology, Block(*pair)) for pair in set(parents)}
    return np.array([even[pair] for pair in parents], dtype=bool)


def _is_even(topology: Topology, block: Block) -> bool:
    sizes = topology.node_sizes(block)
    return len(sizes) > 1 and len(set(sizes)) == 1
