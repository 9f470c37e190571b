"""Seconds of many plans of a small step at once (sync = step), as `evaluate` gives them but for rounding to tokens.

The local search of large steps (`profiles`) adds the in and out exchange of a layer, takes each sample's larger side of
a sparse exchange before samples are summed, and knows no launches. On a step of a few short samples that is several per
cent, more than lies between its best plans. Here both exchanges and all four sides are kept apart, and launches are
counted; a sample still lies evenly on its child's ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypack.plan.table import Table
from raypack.plan.topology import Block
from raypack.planning.problem import Problem
from raypack.planning.search.profiles import layers_added, node_cuts

TOKENS, FULL_HELD, SPARSE_HELD, FULL, CHEAP = range(5)
FULL_IN, FULL_OUT, SPARSE_IN, SPARSE_OUT = (slice(at, at + 4) for at in (5, 9, 13, 17))
ROWS = 21
"""Rows of a load: three memory rows (tokens of a rank), full seconds, cheap seconds without exchanges, and the seconds
of every exchange of full and sparse layers (tokens' and heads' side intra, then inter), all layers and passes."""


@dataclass(frozen=True, eq=False)
class Plans:
    """Plans under construction. `load` float64 [plans, rounds, ROWS, world]; `parents`, `children` bool
    [plans, rounds, blocks]: blocks in use."""

    load: np.ndarray
    parents: np.ndarray
    children: np.ndarray

    def __len__(self) -> int:
        return len(self.load)

    def select(self, rows: np.ndarray) -> Plans:
        return Plans(self.load[rows], self.parents[rows], self.children[rows])


@dataclass(frozen=True, eq=False)
class Prices:
    """float64 [plans]: seconds (infinite over the cap), mean finish of all ranks, and a number that plans share which
    only differ in which of equal ranks do the work."""

    seconds: np.ndarray
    mean: np.ndarray
    likeness: np.ndarray


class Places:
    """Every (parent, child) that a sample may take, what it adds there, and the price of plans made of them.

    Attributes:
        parent, child: int64 [places], index into `blocks` (the topology's, width descending).
        shape: int64 [places], index into `problem.shapes`.
        load: float64 [samples, places, ROWS, world].
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.world, self.blocks = problem.topology.world, problem.topology.blocks
        pairs = [(p, c) for p in range(len(self.blocks)) for c in range(p, len(self.blocks))]
        pairs = [(p, c) for p, c in pairs if self.blocks[p].contains(self.blocks[c])]
        self.parent, self.child = np.array(pairs, dtype=np.int64).T
        widths = [(self.blocks[p].width, self.blocks[c].width) for p, c in pairs]
        self.shape = np.array([problem.shapes.index(*pair) for pair in widths])
        lengths, costs = problem.lengths, problem.costs
        amounts = costs.amounts(lengths)[:-1]
        each = np.stack([addition(problem, self.blocks[p], self.blocks[c]) for p, c in pairs])
        self.load = np.einsum("an,parw->nprw", amounts, each)

    def empty(self, rounds: int) -> Plans:
        """One plan without samples."""
        used = np.zeros((1, rounds, len(self.blocks)), dtype=bool)
        return Plans(np.zeros((1, rounds, ROWS, self.world)), used, used.copy())

    def of(self, table: Table) -> np.ndarray:
        """The place of every sample of a table: int64 [samples]."""
        at = {block: i for i, block in enumerate(self.blocks)}
        codes = {pair: i for i, pair in enumerate(zip(self.parent.tolist(), self.child.tolist(), strict=True))}
        tops = zip(table.parent_first.tolist(), table.parent_width.tolist(), strict=True)
        lows = zip(table.child_first.tolist(), table.child_width.tolist(), strict=True)
        found = [codes[at[Block(*top)], at[Block(*low)]] for top, low in zip(tops, lows, strict=True)]
        return np.array(found, dtype=np.int64)

    def table(self, number: np.ndarray, place: np.ndarray) -> Table:
        """The plan of a round and a place for every sample."""
        ends = np.array(self.blocks, dtype=np.int64)
        top, low = ends[self.parent[place]], ends[self.child[place]]
        return self.problem.table(number, top[:, 0], top[:, 1], low[:, 0], low[:, 1])

    def put(self, plans: Plans, sample: int, number: np.ndarray, place: np.ndarray) -> Plans:
        """Plans with the sample added in round `number` at `place` (int64 [plans]); `plans` may be one for all."""
        count, which = len(number), np.arange(len(number))
        copies = [np.repeat(x, count, 0) if len(plans) == 1 else x.copy() for x in vars(plans).values()]
        made = Plans(*copies)
        made.load[which, number] += self.load[sample, place]
        made.parents[which, number, self.parent[place]] = True
        made.children[which, number, self.child[place]] = True
        return made

    def first_of_equal(self, plans: Plans) -> np.ndarray:
        """Whether a place is not as good as one further left, for sure: no block around its child holds just what the
        block before it holds, in all rounds: bool [plans, places]."""
        same = np.zeros((len(plans), len(self.blocks)), dtype=bool)
        for at, before in self._twins:
            mine, other = self.blocks[at], self.blocks[before]
            loads = plans.load[..., mine.first : mine.end] == plans.load[..., other.first : other.end]
            same[:, at] = loads.all(axis=(1, 2, 3))
        around = np.array([[outer.contains(inner) for inner in self.blocks] for outer in self.blocks])
        return ~(same @ around)[:, self.child]

    def price(self, plans: Plans) -> Prices:
        """Seconds of the step with the samples that each plan has so far; more samples never make it quicker."""
        costs, load = self.problem.costs, plans.load
        top = self._widest(plans.parents)
        packed = top >= 0
        calls = self.problem.passes.exchange
        launch = calls * costs.cluster.launch_seconds
        full = load[:, :, FULL] + self._layers(costs.at_parent) * launch * self._count(plans.parents)
        cheap = load[:, :, CHEAP] + load[:, :, SPARSE_IN].max(axis=2) + load[:, :, SPARSE_OUT].max(axis=2)
        cheap += (
            sum(costs.layers[i].count for i in costs.at_child if costs.layers[i].kind.site)
            * launch
            * self._count(plans.children)
        )
        sparse_calls = sum(layer.count * layer.kind.costing.calls(layer) for layer in costs.layers)
        cheap += calls * sparse_calls * self._latency[self._widest(plans.children)]
        exchange = load[:, :, FULL_IN].max(axis=2) + load[:, :, FULL_OUT].max(axis=2)
        exchange += 2 * calls * self._layers(costs.at_parent) * self._latency[top]
        parts = self._most(np.stack([full, cheap, exchange]), top).sum(axis=0) + costs.cluster.round_seconds
        clock = np.zeros((len(plans), self.world))
        for number in range(load.shape[1]):
            starts = self._most(clock, top[:, number])
            clock = np.where(packed[:, number], starts + parts[:, number], clock)
        over = load[:, :, : SPARSE_HELD + 1].max(axis=(1, 2, 3)) > self.problem.cap * (1 + 1e-9)
        sums = parts + full
        likeness = (sums * sums).sum(axis=(1, 2)) + (clock * full.sum(axis=1)).sum(axis=1)
        return Prices(np.where(over, np.inf, clock.max(axis=1)), clock.mean(axis=1), likeness)

    def _layers(self, kinds: tuple[int, ...]) -> int:
        return sum(self.problem.costs.layers[i].count for i in kinds)

    def _count(self, used: np.ndarray) -> np.ndarray:
        """Used blocks around each rank: [plans, rounds, world]."""
        return used.astype(np.float64) @ self._holds.astype(np.float64)

    def _widest(self, used: np.ndarray) -> np.ndarray:
        """Widest used block around each rank, or -1: [plans, rounds, world]."""
        around = used[..., None] & self._holds
        return np.where(around.any(axis=2), around.argmax(axis=2), -1)

    def _most(self, values: np.ndarray, top: np.ndarray) -> np.ndarray:
        """Largest of `values` [..., world] over the block `top` of each rank; garbage where there is none."""
        ends = [values[..., b.first : b.first + b.width].max(axis=-1) for b in self.blocks]
        most = np.stack(ends, axis=-1)
        return np.take_along_axis(most, np.broadcast_to(top, values.shape), axis=-1)

    @cached_property
    def _twins(self) -> list[tuple[int, int]]:
        """(block, the block before it) of one width, in one next wider block, with nodes cut alike."""
        topology, found = self.problem.topology, []
        last: dict[tuple[Block, tuple[int, ...]], int] = {}
        for at, block in enumerate(self.blocks):
            wider = [b for b in self.blocks if b.width > block.width and b.contains(block)]
            cuts = node_cuts(topology, block)
            key = (wider[-1] if wider else block, (block.width, *cuts))
            if key in last:
                found.append((at, last[key]))
            last[key] = at
        return found

    @cached_property
    def _holds(self) -> np.ndarray:
        """bool [blocks, world]."""
        return np.array([[block.holds(rank) for rank in range(self.world)] for block in self.blocks])

    @cached_property
    def _latency(self) -> np.ndarray:
        """Seconds of one collective of each block, and 0 at the end, for none: [blocks + 1]."""
        costs, topology = self.problem.costs, self.problem.topology
        each = [costs.latency(not topology.in_one_node(b)) if b.width > 1 else 0.0 for b in self.blocks]
        return np.array([*each, 0.0])


def addition(problem: Problem, parent: Block, child: Block) -> np.ndarray:
    """What a sample adds to every rank, for each of `Costs.amounts` but the last: float64 [amounts, ROWS, world]."""
    costs, topology, recompute = problem.costs, problem.topology, problem.recompute
    wide, narrow = slice(parent.first, parent.end), slice(child.first, child.end)
    out = np.zeros((len(costs.layers) + 1, ROWS, topology.world))
    out[0, TOKENS, narrow] = 1 / child.width
    out[0, CHEAP, narrow] = costs.token_seconds(recompute) / child.width
    for each in layers_added(topology, costs, recompute, parent, child, problem.attention):
        ranks, held = (wide, FULL_HELD) if each.at_parent else (narrow, SPARSE_HELD)
        into, out_of = (FULL_IN, FULL_OUT) if each.at_parent else (SPARSE_IN, SPARSE_OUT)
        out[each.amount, FULL if each.at_parent else CHEAP, ranks] = each.seconds
        out[0, held, ranks] = np.maximum(out[0, held, ranks], each.held)
        out[0, into, ranks] += each.rate * each.added.inward
        out[0, out_of, ranks] += each.rate * each.added.outward
    return out
