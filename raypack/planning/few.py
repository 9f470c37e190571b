"""Search for steps of few samples on few ranks (sync = step), where every plan can be priced whole (`exact`).

A move takes one to four samples out of a plan and puts them back one after the other, longest first, keeping a few of
the best partial plans (a beam). More samples never make a plan quicker, so a partial plan that is no better than the
best whole one is dropped; of partial plans that only differ in which of equal ranks do the work, one is kept. The first
move takes all samples out. Where no move helps any more, the beam widens. Deterministic: the order of moves is seeded,
and the budget counts priced plans.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from raypack.planning.exact import Places, Plans
from raypack.planning.neighbours import MEAN_WEIGHT
from raypack.planning.problem import Problem
from raypack.planning.rules import AREA_STRETCH
from raypack.planning.search import CLOSE, JUDGE_COST, Budget
from raypack.planning.table import Table

SAMPLES, RANKS = 12, 16
"""Steps that are searched this way have at most so many."""

BEAM, WIDEST_BEAM = 4, 32
"""Partial plans kept at first, and where narrower beams find no better plan any more."""

MOST_OUT = 4
"""Samples that one move takes out at most, but for the first, which takes out all."""

JUDGED = 8
"""Of the best plans found so many get a verdict: a sample's tokens do not always divide evenly, as priced."""


def is_few(problem: Problem) -> bool:
    """Whether a step is small enough for this search, and its sync is the one that `exact` prices."""
    small = len(problem.lengths) <= SAMPLES and problem.topology.world <= RANKS
    return small and problem.sync == "step"


def improve_few(problem: Problem, table: Table) -> Table:
    """The best plan that the budget finds from `table`, by `Problem.judge`; `table` itself where it finds none."""
    seconds = problem.judge(table)
    enough = problem.bounds.area * (1 + CLOSE)
    search = _Search(problem, table, seconds)
    if seconds > enough:
        search.run(enough)
    best = table
    for found in search.tables():
        value = problem.judge(found)
        if value < seconds:
            best, seconds = found, value
    return best


@dataclass(frozen=True, eq=False)
class _Whole:
    """A plan of all samples: int64 [samples] rounds and places (index into `Places`), objective and seconds."""

    number: np.ndarray
    place: np.ndarray
    value: float
    seconds: float


@dataclass(frozen=True, eq=False)
class _Beam:
    """Partial plans: `number`, `place` int64 [plans, samples put back so far], objective and seconds [plans]."""

    plans: Plans
    number: np.ndarray
    place: np.ndarray
    value: np.ndarray
    seconds: np.ndarray


class _Search:
    def __init__(self, problem: Problem, table: Table, seconds: float) -> None:
        self.problem, self.rounds = problem, table.rounds + 1
        self.places = Places(problem)
        self.budget = Budget(problem.budget - JUDGED * JUDGE_COST)
        number, place = table.round, self.places.of(table)
        self.options = self._options(seconds, place)
        prices = self.places.price(self._without(number, place, ()))
        value = float(prices.seconds[0] + MEAN_WEIGHT * prices.mean[0])
        self.found = [_Whole(number, place, value, float(prices.seconds[0]))]

    def _options(self, limit: float, place: np.ndarray) -> list[np.ndarray]:
        """Places of each sample that are quicker than the plan, and not wasteful; its own among them."""
        problem, lengths = self.problem, self.problem.lengths
        shapes, used = problem.shapes, problem.used(lengths)
        quick = shapes.fits(lengths) & (shapes.seconds(lengths) < limit)
        least = np.where(quick, used, np.inf).min(axis=1, keepdims=True)
        worth = (quick & (used <= AREA_STRETCH * least))[:, self.places.shape]
        worth[np.arange(len(lengths)), place] = True
        return [np.flatnonzero(row) for row in worth]

    def run(self, enough: float) -> None:
        """Moves until the budget is spent, no move helps, or the best plan takes at most `enough` seconds."""
        count = len(self.problem.lengths)
        rng = random.Random(0)
        sizes = range(1, min(MOST_OUT, count) + 1)
        # The fewer moves of a size there are, the earlier they come: sizes alternate at first.
        moves = [(rng.random() * comb(count, size), out) for size in sizes for out in combinations(range(count), size)]
        everything = tuple(range(count))
        order = [everything, *(out for _, out in sorted(moves) if out != everything)]
        whole_cost = self.rounds * sum(map(len, self.options))
        beam = min(BEAM, self.budget.left // whole_cost)
        at, idle = (0, 0) if beam else (1, 0)
        beam = max(beam, 2)
        while self.budget.left > 0 and self.found[-1].seconds > enough:
            better = self._move(order[at], beam)
            idle = 0 if better else idle + 1
            at = (at + 1) % len(order)
            if idle >= len(order):
                beam, idle = 2 * beam, 0
                if beam > WIDEST_BEAM:
                    return

    def _move(self, out: tuple[int, ...], width: int) -> bool:
        """Take samples out of the best plan and put them back; whether that made it better."""
        best = self.found[-1]
        plans = self._without(best.number, best.place, out)
        none = np.zeros((1, 0), dtype=np.int64)
        beam = _Beam(plans, none, none, np.zeros(1), np.zeros(1))
        for sample in out:
            beam = self._extend(beam, sample, best.value, width)
            if not len(beam.plans) or (self.budget.left <= 0 and sample != out[-1]):
                return False
        number, place = best.number.copy(), best.place.copy()
        number[list(out)], place[list(out)] = beam.number[0], beam.place[0]
        self.found.append(_Whole(number, place, float(beam.value[0]), float(beam.seconds[0])))
        return True

    def _extend(self, beam: _Beam, sample: int, limit: float, width: int) -> _Beam:
        """The best partial plans with one sample more, best first, all below the objective `limit`."""
        options = self.options[sample]
        grids = np.meshgrid(np.arange(len(beam.plans)), np.arange(self.rounds), options, indexing="ij")
        base, number, place = (grid.ravel() for grid in grids)
        plans = self.places.put(beam.plans.select(base), sample, number, place)
        self.budget.spend(len(base))
        prices = self.places.price(plans)
        value = prices.seconds + MEAN_WEIGHT * prices.mean
        kept = _distinct(value, prices.likeness, limit * (1 - 1e-9), width)
        return _Beam(
            plans.select(kept),
            np.concatenate([beam.number[base[kept]], number[kept, None]], axis=1),
            np.concatenate([beam.place[base[kept]], place[kept, None]], axis=1),
            value[kept],
            prices.seconds[kept],
        )

    def _without(self, number: np.ndarray, place: np.ndarray, out: tuple[int, ...]) -> Plans:
        """A plan with the samples `out` left away."""
        plans = self.places.empty(self.rounds)
        for sample in range(len(number)):
            if sample not in out:
                plans = self.places.put(plans, sample, number[sample : sample + 1], place[sample : sample + 1])
        return plans

    def tables(self) -> list[Table]:
        """The best plans found, best first."""
        return [self.places.table(whole.number, whole.place) for whole in self.found[: -JUDGED - 1 : -1]]


def _distinct(value: np.ndarray, likeness: np.ndarray, limit: float, most: int) -> np.ndarray:
    """Rows of the least values below `limit`, ascending; of rows with equal value and likeness one: int64."""
    below = np.flatnonzero(value < limit)
    order = below[np.lexsort((likeness[below], value[below]))]
    new = np.ones(len(order), dtype=bool)
    for each in (value[order], likeness[order]):
        new[1:] &= np.abs(np.diff(each)) <= 1e-9 * np.abs(each[1:])
    new[1:] = ~new[1:]
    return order[new][:most]
