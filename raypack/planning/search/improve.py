"""Local search: ruin and recreate with simulated annealing (Schrimpf et al. 2000; Christiaens and Vanden Berghe 2020).

A move takes one or more samples out, one of them from the path that the step waits for, and puts them back one after
the other, longest first, each where the step is then shortest. Now and then a place is overlooked on purpose. Worse
plans are accepted with a chance that falls as the budget is spent; the best one is kept. Deterministic: the generator
is seeded, and the budget counts priced candidates, not seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raypack.plan.table import Table
from raypack.planning.problem import Problem
from raypack.planning.search.draft import Draft
from raypack.planning.search.neighbours import Candidates, clocks, objective, values
from raypack.planning.search.profiles import EXCHANGE, FULL

HOT, COLD = 0.03, 0.0005
"""First and last temperature, as a share of the objective at the start."""

MOST_OUT = 6
"""Samples that one move takes out at most."""

BLINK = 0.05
"""Chance that a place is overlooked."""

CLOSE = 0.001
"""A plan this near to the area bound ends the search."""

NEAR, LUCKY = 0.02, 0.1
"""Plans this near to the best objective are judged too, with this chance."""

JUDGE_COST, MOVE_COST = 100, 50
"""What a verdict on a whole plan and a reinsertion take from the budget besides the candidates that they price."""

Place = tuple[int, int, int]


@dataclass(eq=False)
class Budget:
    """Candidates that may still be priced."""

    left: int

    def spend(self, count: int) -> None:
        self.left -= count


def improve(draft: Draft, choices: Callable[[int], Candidates], budget: Budget, seed: int) -> tuple[Table, float]:
    """Search from `draft` until the budget is spent or the bound is reached.

    Args:
        choices: places that a sample may take (its policy's rules).

    Returns:
        The best plan by `Problem.judge`, and its seconds. The search's own objective spreads every sample evenly over
        its child, which not every stream does; so each new best of the search is judged before it counts.
    """
    rng = random.Random(seed)
    blink = np.random.Generator(np.random.PCG64(seed))
    whole = max(budget.left, 1)
    now = least = objective(draft)
    scale = now if np.isfinite(now) else 1.0
    best = draft.table()
    best_seconds = draft.problem.judge(best)
    enough = draft.problem.bounds.area * (1 + CLOSE)
    while budget.left > 0 and best_seconds > enough:
        temperature = scale * HOT * (COLD / HOT) ** (1 - budget.left / whole)
        out = _choose(draft, rng)
        old = [draft.take(sample) for sample in out]
        _recreate(draft, out, old, choices, budget, blink)
        value = objective(draft)
        if value > now and rng.random() >= math.exp((now - value) / temperature):
            _restore(draft, out, old)
            continue
        now = value
        # Near the best, a plan whose streams happen to lie better may win although the objective does not say so.
        if now < least * (1 + NEAR) and (now < least or rng.random() < LUCKY):
            budget.spend(JUDGE_COST)
            table = draft.table()
            seconds = draft.problem.judge(table)
            if seconds < best_seconds:
                best, best_seconds = table, seconds
        least = min(least, now)
    return best, best_seconds


def _choose(draft: Draft, rng: random.Random) -> list[int]:
    """Samples to take out, longest first: one of the critical path, the others anywhere."""
    count = len(draft.round)
    out = {rng.choice(critical_samples(draft))}
    for _ in range(min(rng.choice((0, 0, 1, 1, 2, 3, MOST_OUT - 1)), count - 1)):
        out.add(rng.randrange(count))
    return sorted(out)


def _recreate(
    draft: Draft,
    out: list[int],
    old: list[Place],
    choices: Callable[[int], Candidates],
    budget: Budget,
    blink: np.random.Generator,
) -> None:
    for sample, place in zip(out, old, strict=True):
        found = choices(sample)
        budget.spend(len(found) + MOVE_COST)
        price = values(draft, sample, found).objective
        price[blink.random(len(price)) < BLINK] = np.inf
        if len(out) == 1:
            price[_index(found, place)] = np.inf
        at = int(price.argmin())
        draft.put(sample, found.at(at) if np.isfinite(price[at]) else place)


def _index(candidates: Candidates, place: Place) -> np.ndarray:
    return (candidates.round == place[0]) & (candidates.shape == place[1]) & (candidates.pair == place[2])


def _restore(draft: Draft, samples: list[int], places: list[Place]) -> None:
    for sample, place in zip(samples, places, strict=True):
        if (draft.round[sample], draft.shape[sample], draft.pair[sample]) != place:
            draft.take(sample)
            draft.put(sample, place)


def critical_samples(draft: Draft) -> list[int]:
    """Samples on the busiest rank (full, cheap or exchange) of the packs that the step waits for, longest first."""
    ranks: list[tuple[int, int]] = []
    for number, pack in _critical_packs(draft):
        packs = draft.packs(number)
        first, end = int(packs.first[pack]), int(packs.end[pack])
        load = draft.loads[number, :, first:end]
        busiest = {int(load[FULL].argmax()), int(draft.cheap(load).argmax())}
        if end - first > 1:
            busiest.add(int(load[EXCHANGE].max(axis=0).argmax()))
        ranks.extend((number, first + row) for row in busiest)
    chosen = np.zeros(len(draft.round), dtype=bool)
    starts, ends = draft.parent_spans()
    for number, rank in ranks:
        chosen |= (draft.round == number) & (starts <= rank) & (rank < ends)
    return np.flatnonzero(chosen).tolist()


def _critical_packs(draft: Draft) -> list[tuple[int, int]]:
    """(round, pack) on the longest path; under sync = layer the slowest pack of every round."""
    found = []
    if not draft.problem.meets_in_packs:
        for number in range(draft.rounds):
            packs = draft.packs(number)
            if len(packs.first):
                found.append((number, int(packs.seconds[packs.first].argmax())))
        return found
    timing = clocks(draft)
    rank = int(timing.before[-1].argmax())
    for number in reversed(range(draft.rounds)):
        packs = draft.packs(number)
        inside = np.flatnonzero((packs.first <= rank) & (rank < packs.end))
        if len(inside):
            pack = int(inside[0])
            found.append((number, pack))
            span = slice(int(packs.first[pack]), int(packs.end[pack]))
            rank = span.start + int(timing.before[number, span].argmax())
    return found


SAMPLES_PER_RANK, SAMPLES = 12, 4096
"""With more samples a rank, list scheduling alone is within a few thousandths of the bound; with more in all, a search
is slow. What matters little is not tried there."""

SPARE_ROUNDS = 1
"""Empty rounds that the search may use before and after those of the plan."""

FEW, FEW_STARTS, STARTS = 12, 4, 2
"""With so few samples a search soon sees all that it will, and several of them see more."""

Rules = Callable[[Draft], Callable[[int], Candidates]]


def few_samples(problem: Problem) -> bool:
    """Whether the step has so few samples that their sizes alone keep ranks waiting."""
    return len(problem.lengths) <= min(SAMPLES_PER_RANK * problem.topology.world, SAMPLES)


def worth_searching(problem: Problem) -> bool:
    """Whether there is a budget, and few enough samples for it to matter."""
    return problem.budget > 0 and few_samples(problem)


def refine(problem: Problem, table: Table, rules: Rules, *, spare: int = SPARE_ROUNDS) -> tuple[Table, float]:
    """The best plan that the budget finds from `table`, and its seconds; several searches share the budget."""
    best, best_seconds = table, problem.judge(table)
    starts = FEW_STARTS if len(problem.lengths) <= FEW else STARTS
    for seed in range(starts):
        draft = Draft.of(problem, table, table.rounds + 2 * spare, spare)
        found, seconds = improve(draft, rules(draft), Budget(problem.budget // starts), seed)
        if seconds < best_seconds:
            best, best_seconds = found, seconds
    return best, best_seconds
