"""Where and how much local search a policy gets."""

from __future__ import annotations

from collections.abc import Callable

from raypack.plan.table import Table
from raypack.planning.neighbours import Candidates
from raypack.planning.problem import Problem
from raypack.planning.search import Budget, improve
from raypack.planning.state import State

SAMPLES_PER_RANK, SAMPLES = 12, 4096
"""With more samples a rank, list scheduling alone is within a few thousandths of the bound; with more in all, a search
is slow. What matters little is not tried there."""

SPARE_ROUNDS = 1
"""Empty rounds that the search may use before and after those of the plan."""

FEW, FEW_STARTS, STARTS = 12, 4, 2
"""With so few samples a search soon sees all that it will, and several of them see more."""

Rules = Callable[[State], Callable[[int], Candidates]]


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
        state = State.of(problem, table, table.rounds + 2 * spare, spare)
        found, seconds = improve(state, rules(state), Budget(problem.budget // starts), seed)
        if seconds < best_seconds:
            best, best_seconds = found, seconds
    return best, best_seconds
