"""A plan under change: loads of every round and rank and their packs, with samples taken out and put back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.plan.grid import grid, interval_max, unions
from raypack.plan.table import Table
from raypack.planning.problem import Problem
from raypack.planning.search.profiles import CHEAP, CHILDREN, CROSSING, EXCHANGE, FULL, ROWS, PairList


@dataclass(frozen=True, eq=False)
class Packs:
    """Packs of one round: rank intervals [first, end), and for every rank the figures of its pack (0 outside).

    Attributes:
        full, cheap, exchange, seconds: float64 [world].
        pack_first, pack_end: int64 [world], the interval of the rank's pack; the rank alone outside.
        ranks, at: ranks inside packs, and the pack of each.
    """

    first: np.ndarray
    end: np.ndarray
    full: np.ndarray
    cheap: np.ndarray
    exchange: np.ndarray
    seconds: np.ndarray
    pack_first: np.ndarray
    pack_end: np.ndarray
    ranks: np.ndarray
    at: np.ndarray


class Draft:
    """A plan of `problem` in `rounds` rounds (some may be empty), searched under the problem's sync."""

    def __init__(self, problem: Problem, rounds: int) -> None:
        self.problem = problem
        world, costs = problem.topology.world, problem.costs
        lengths = problem.lengths
        self.rounds = rounds
        self.amounts = costs.amounts(lengths).T.copy()
        self.loads = np.zeros((rounds, ROWS, world))
        self.round = np.full(len(lengths), -1, dtype=np.int64)
        self.shape = np.zeros(len(lengths), dtype=np.int64)
        self.pair = np.zeros(len(lengths), dtype=np.int64)
        self._first = np.zeros(len(lengths), dtype=np.int64)
        self._parents: list[dict[tuple[int, int], int]] = [{} for _ in range(rounds)]
        self._packs: list[Packs | None] = [None] * rounds

    def pairs(self, shape: int) -> PairList:
        return self.problem.pairs(shape)

    def put(self, sample: int, place: tuple[int, int, int]) -> None:
        """Add a sample that is nowhere at (round, shape, pair)."""
        self._change(sample, place, 1)
        self.round[sample], self.shape[sample], self.pair[sample] = place
        self._first[sample] = self.pairs(place[1]).parent_first[place[2]]

    def take(self, sample: int) -> tuple[int, int, int]:
        """Remove a sample; returns where it was."""
        place = int(self.round[sample]), int(self.shape[sample]), int(self.pair[sample])
        self._change(sample, place, -1)
        self.round[sample] = -1
        return place

    def _change(self, sample: int, place: tuple[int, int, int], sign: int) -> None:
        number, shape, pair = place
        pairs = self.pairs(shape)
        first, width = int(pairs.parent_first[pair]), pairs.parent_width
        addition = np.tensordot(self.amounts[sample], pairs.stack[pairs.profile[pair]], axes=1)
        self.loads[number, :, first : first + width] += sign * addition
        parents = self._parents[number]
        left = parents.get((first, width), 0) + sign
        if left:
            parents[first, width] = left
        else:
            del parents[first, width]
            if not parents:
                self.loads[number] = 0.0
        self._packs[number] = None

    def packs(self, number: int) -> Packs:
        """Packs of a round as it stands."""
        found = self._packs[number]
        if found is None:
            found = self._packs[number] = self._find_packs(number)
        return found

    def _find_packs(self, number: int) -> Packs:
        world = self.problem.topology.world
        blocks = np.array(list(self._parents[number]), dtype=np.int64).reshape(-1, 2)
        first, end = unions(*self.meeting(blocks[:, 0], blocks[:, 1]))
        load = self.loads[number]
        exchange = interval_max(load[EXCHANGE].max(axis=0), first, end) + self.pack_latency(first, end)
        full, cheap = interval_max(load[FULL], first, end), interval_max(self.cheap(load), first, end)
        seconds = full + cheap + exchange + self.problem.costs.cluster.round_seconds
        sizes = end - first
        at = np.repeat(np.arange(len(first)), sizes)
        ranks = np.arange(len(at)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + first[at]

        def spread(values: np.ndarray) -> np.ndarray:
            out = np.zeros(world)
            out[ranks] = values[at]
            return out

        pack_first, pack_end = np.arange(world), np.arange(world) + 1
        pack_first[ranks], pack_end[ranks] = first[at], end[at]
        return Packs(
            first, end, spread(full), spread(cheap), spread(exchange), spread(seconds), pack_first, pack_end, ranks, at
        )

    def meeting(self, first: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ranks that a block makes wait for each other, as (first, width): under sync = node whole nodes."""
        if self.problem.sync != "node":
            return first, width
        where = grid(self.problem.topology)
        start = where.node_first[first]
        return start, where.node_end[first + width - 1] - start

    def cheap(self, load: np.ndarray) -> np.ndarray:
        """Cheap seconds with the latency of the child's collectives; rows first, ranks last."""
        costs = self.problem.costs
        calls = sum(layer.count * layer.kind.costing.calls(layer) for layer in costs.layers)
        times = calls * self.problem.passes.exchange
        count = load[CHILDREN]
        latency = np.where(count > 0, costs.latency(False), 0.0)
        return load[CHEAP] + times * np.where(count >= CROSSING, costs.latency(True), latency)

    def pack_latency(self, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Seconds of the collectives of all full layers on packs [first, end)."""
        costs = self.problem.costs
        times = 2 * sum(costs.layers[i].count for i in costs.at_parent) * self.problem.passes.exchange
        node = grid(self.problem.topology).node
        crosses = node[first] != node[end - 1]
        latency = np.where(crosses, costs.latency(True), costs.latency(False))
        return times * np.where(end - first > 1, latency, 0.0)

    @classmethod
    def of(cls, problem: Problem, table: Table, rounds: int, shift: int = 0) -> Draft:
        """The draft of a finished plan, its rounds moved back by `shift`."""
        draft = cls(problem, rounds)
        for sample, place in enumerate(draft.places(table)):
            draft.put(sample, (place[0] + shift, *place[1:]))
        return draft

    def places(self, table: Table) -> list[tuple[int, int, int]]:
        """(round, shape, pair) of every row of a table."""
        codes: dict[tuple[int, int], int] = {
            (int(p), int(c)): i
            for i, (p, c) in enumerate(zip(self.problem.shapes.parent, self.problem.shapes.child, strict=True))
        }
        columns = (table.round, table.parent_width, table.child_width, table.child_first)
        found = []
        for number, parent, child, first in zip(*(c.tolist() for c in columns), strict=True):
            shape = codes[parent, child]
            found.append((number, shape, int(np.searchsorted(self.pairs(shape).child_first, first))))
        return found

    def depth(self) -> np.ndarray:
        """int64 [world]: one past the last round in which each rank has a pack."""
        found = np.zeros(self.problem.topology.world, dtype=np.int64)
        for number in range(self.rounds):
            found[self.packs(number).ranks] = number + 1
        return found

    def table(self, rest: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None) -> Table:
        """The plan as it stands. `rest`: (sample, round, first, width) of samples with parent = child besides."""
        rounds = self.round.copy()
        columns = np.empty((4, len(rounds)), dtype=np.int64)
        for shape in np.unique(self.shape[rounds >= 0]).tolist():
            rows, pairs = np.flatnonzero((self.shape == shape) & (rounds >= 0)), self.pairs(shape)
            columns[0, rows] = pairs.parent_first[self.pair[rows]]
            columns[1, rows] = pairs.parent_width
            columns[2, rows] = pairs.child_first[self.pair[rows]]
            columns[3, rows] = pairs.child_width
        if rest is not None:
            rows, rounds[rest[0]] = rest[0], rest[1]
            columns[:, rows] = np.stack([rest[2], rest[3], rest[2], rest[3]])
        return self.problem.table(rounds, *columns)

    def parent_spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First rank and end of every sample's parent."""
        return self._first, self._first + self.problem.shapes.parent[self.shape]

    def copy(self) -> Draft:
        """An independent draft with the same placements."""
        other = Draft(self.problem, self.rounds)
        for name in ("loads", "round", "shape", "pair", "_first"):
            getattr(other, name)[...] = getattr(self, name)
        other._parents = [dict(parents) for parents in self._parents]
        return other
