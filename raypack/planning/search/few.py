"""Search for steps of few samples on few ranks (sync = step), where every plan can be priced whole (`exact`).

Samples that are out of a plan are put back one after the other, longest first, keeping the best partial plans (a beam).
More samples never make a plan quicker, so a partial plan that is over the limit is dropped; of partial plans that only
differ in which of equal ranks do the work, one is kept. First all samples are out, with a narrow and a wide beam. Then
moves take a few out, overlook some places, and keep one partial plan; a move is accepted if its plan is at most a bit
slower than the best one, ever less so (threshold accepting, Dueck and Scheuer 1990). Deterministic: the generators are
seeded, and the budget counts priced plans.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from raypack.plan.table import Table
from raypack.planning.problem import Problem
from raypack.planning.search.exact import Places, Plans
from raypack.planning.search.improve import CLOSE, JUDGE_COST, Budget
from raypack.planning.search.neighbours import MEAN_WEIGHT
from raypack.planning.search.rules import AREA_STRETCH

SAMPLES, RANKS = 12, 16
"""Steps that are searched this way have at most so many."""

BEAM, WIDE_BEAM = 4, 12
"""Partial plans kept while all samples are out; the wide beam only where the budget has room for it."""

OUT = (2, 3, 4)
"""Samples that a move takes out."""

OVERLOOK = 0.2
"""Chance that a move overlooks a place."""

TINY, TINY_SLACK, SLACK = 8, 0.1, 0.02
"""First threshold, as a share of the best objective: with at most so many samples plans lie further apart."""

MOVE_LEAST = 20
"""Moves end after the budget over this: those of a step of one or two samples price few plans, but take as long."""

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
        """Search until the budget is spent, or the best plan takes at most `enough` seconds."""
        count, left = len(self.problem.lengths), self.budget.left
        everything = tuple(range(count))
        self._note(self._put_back(self.best, everything, self.best.value, BEAM, self.options))
        if (left - self.budget.left) * (WIDE_BEAM / BEAM + 1) < self.budget.left:
            self._note(self._put_back(self.best, everything, self.best.value, WIDE_BEAM, self.options))
        rng, blink = random.Random(0), np.random.Generator(np.random.PCG64(0))
        slack, whole = TINY_SLACK if count <= TINY else SLACK, max(self.budget.left, 1)
        now = self.best
        for _ in range(1 + whole // MOVE_LEAST):
            if self.budget.left <= 0 or self.best.seconds <= enough:
                return
            out = tuple(sorted(rng.sample(everything, min(rng.choice(OUT), count))))
            options = [places[blink.random(len(places)) >= OVERLOOK] for places in self.options]
            limit = self.best.value * (1 + slack * self.budget.left / whole)
            now = self._put_back(now, out, limit, 1, options) or now
            self._note(now)

    @property
    def best(self) -> _Whole:
        return self.found[-1]

    def _note(self, whole: _Whole | None) -> None:
        if whole is not None and whole.value < self.best.value * (1 - 1e-9):
            self.found.append(whole)

    def _put_back(
        self, whole: _Whole, out: tuple[int, ...], limit: float, width: int, options: list[np.ndarray]
    ) -> _Whole | None:
        """The plan with the samples `out` put back anew, on places of `options`; None if none is below `limit`."""
        none = np.zeros((1, 0), dtype=np.int64)
        beam = _Beam(self._without(whole.number, whole.place, out), none, none, np.zeros(1), np.zeros(1))
        for sample in out:
            if self.budget.left <= 0:
                return None
            beam = self._extend(beam, sample, limit, width, options[sample])
            if not len(beam.plans):
                return None
        number, place = whole.number.copy(), whole.place.copy()
        number[list(out)], place[list(out)] = beam.number[0], beam.place[0]
        return _Whole(number, place, float(beam.value[0]), float(beam.seconds[0]))

    def _extend(self, beam: _Beam, sample: int, limit: float, width: int, options: np.ndarray) -> _Beam:
        """The best partial plans with one sample more, best first, all below the objective `limit`."""
        fresh = self.places.first_of_equal(beam.plans)[:, options]
        base, number, place = np.nonzero(np.repeat(fresh[:, None], self.rounds, axis=1))
        place = options[place]
        plans = self.places.put(beam.plans.select(base), sample, number, place)
        self.budget.spend(max(len(base), 1))
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
