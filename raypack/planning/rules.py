"""Which places a policy lets a sample take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from raypack.planning.neighbours import Candidates
from raypack.planning.problem import Problem
from raypack.planning.state import State

AREA_STRETCH = 1.6
"""Shapes that take more rank-seconds than this times the least are left out of the search."""

TIME_STRETCH = 1.25
"""Shapes that alone take longer than this times the step are left out of the search."""


def free(state: State, equal: bool) -> Callable[[int], Candidates]:
    """Any block and round, shapes that are worth it for the sample's length; `equal`: parent = child only."""
    problem = state.problem
    limit = TIME_STRETCH * problem.bounds.area

    @cache
    def of_length(length: int) -> Candidates:
        return places(state, tuple(worthwhile(problem, length, limit, equal).tolist()))

    return lambda sample: of_length(int(problem.lengths[sample]))


def worthwhile(problem: Problem, length: int, limit: float, equal: bool) -> np.ndarray:
    """Shapes with few rank-seconds among those that are quick enough (or quickest): indices into `problem.shapes`."""
    shapes, n = problem.shapes, np.array([length])
    seconds, fits = shapes.seconds(n)[0], shapes.fits(n)[0]
    if equal:
        fits &= shapes.parent == shapes.child
    used = problem.used(n)[0]
    quick = fits & (seconds <= max(limit, seconds[fits].min() * (1 + 1e-9)))
    return np.flatnonzero(quick & (used <= AREA_STRETCH * used[quick].min()))


def same_packs(state: State) -> Callable[[int], Candidates]:
    """Parent and round stay; the child is node-local, or the whole parent."""
    return _in_slots(state, {s: frozenset([slot]) for s, slot in enumerate(_slots(state))})


def same_slots(state: State) -> Callable[[int], Candidates]:
    """Any pack that the plan has, of any width; the child is node-local, or the whole parent."""
    every = frozenset(_slots(state))
    return _in_slots(state, dict.fromkeys(range(len(state.round)), every))


def _slots(state: State) -> list[tuple[int, int, int]]:
    """(round, parent width, parent first) of every sample."""
    first, _ = state.parent_spans()
    widths = state.problem.shapes.parent[state.shape]
    return list(zip(state.round.tolist(), widths.tolist(), first.tolist(), strict=True))


def _in_slots(state: State, allowed: dict[int, frozenset[tuple[int, int, int]]]) -> Callable[[int], Candidates]:
    shapes = state.problem.shapes
    usable = shapes.local | (shapes.parent == shapes.child)

    @cache
    def of_slots(slots: frozenset[tuple[int, int, int]], length: int) -> Candidates:
        widths = np.unique([width for _, width, _ in slots])
        wanted = usable & np.isin(shapes.parent, widths) & shapes.fits(np.array([length]))[0]
        found = places(state, tuple(np.flatnonzero(wanted).tolist()))
        first = np.empty(len(found), dtype=np.int64)
        for shape in np.unique(found.shape).tolist():
            rows = found.shape == shape
            first[rows] = state.pairs(shape).parent_first[found.pair[rows]]
        keys = _code(found.round, shapes.parent[found.shape], first)
        given = np.array(sorted(slots), dtype=np.int64).T
        return found.select(np.isin(keys, _code(*given)))

    return lambda sample: of_slots(allowed[sample], int(state.problem.lengths[sample]))


def _code(number: np.ndarray, width: np.ndarray, first: np.ndarray) -> np.ndarray:
    """One integer for (round, width, first); worlds stay far below 2^24 ranks."""
    return (number << 48) | (width << 24) | first


def places(state: State, shapes: tuple[int, ...]) -> Candidates:
    """Every block pair of these shapes in every round."""
    rounds = np.arange(state.rounds)
    number, shape, pair = [], [], []
    for each in shapes:
        count = len(state.pairs(each).child_first)
        number.append(np.repeat(rounds, count))
        shape.append(np.full(count * state.rounds, each))
        pair.append(np.tile(np.arange(count), state.rounds))
    return Candidates(*(np.concatenate(part) for part in (number, shape, pair)))
