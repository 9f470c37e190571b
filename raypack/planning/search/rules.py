"""Which places a policy lets a sample take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from raypack.planning.problem import Problem
from raypack.planning.search.draft import Draft
from raypack.planning.search.neighbours import Candidates

AREA_STRETCH = 1.6
"""Shapes that take more rank-seconds than this times the least are left out of the search."""

TIME_STRETCH = 1.25
"""Shapes that alone take longer than this times the step are left out of the search."""


def free(draft: Draft, equal: bool) -> Callable[[int], Candidates]:
    """Any block and round, shapes that are worth it for the sample's length; `equal`: parent = child only."""
    problem = draft.problem
    limit = TIME_STRETCH * problem.bounds.area

    @cache
    def of_length(length: int) -> Candidates:
        return places(draft, tuple(worthwhile(problem, length, limit, equal).tolist()))

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


def same_packs(draft: Draft) -> Callable[[int], Candidates]:
    """Parent and round stay; the child is node-local, or the whole parent."""
    return _in_slots(draft, {s: frozenset([slot]) for s, slot in enumerate(_slots(draft))})


def same_slots(draft: Draft) -> Callable[[int], Candidates]:
    """Any pack that the plan has, of any width; the child is node-local, or the whole parent."""
    every = frozenset(_slots(draft))
    return _in_slots(draft, dict.fromkeys(range(len(draft.round)), every))


def _slots(draft: Draft) -> list[tuple[int, int, int]]:
    """(round, parent width, parent first) of every sample."""
    first, _ = draft.parent_spans()
    widths = draft.problem.shapes.parent[draft.shape]
    return list(zip(draft.round.tolist(), widths.tolist(), first.tolist(), strict=True))


def _in_slots(draft: Draft, allowed: dict[int, frozenset[tuple[int, int, int]]]) -> Callable[[int], Candidates]:
    shapes = draft.problem.shapes
    usable = shapes.local | (shapes.parent == shapes.child)

    @cache
    def of_slots(slots: frozenset[tuple[int, int, int]], length: int) -> Candidates:
        widths = np.unique([width for _, width, _ in slots])
        wanted = usable & np.isin(shapes.parent, widths) & shapes.fits(np.array([length]))[0]
        found = places(draft, tuple(np.flatnonzero(wanted).tolist()))
        first = np.empty(len(found), dtype=np.int64)
        for shape in np.unique(found.shape).tolist():
            rows = found.shape == shape
            first[rows] = draft.pairs(shape).parent_first[found.pair[rows]]
        keys = _code(found.round, shapes.parent[found.shape], first)
        given = np.array(sorted(slots), dtype=np.int64).T
        return found.select(np.isin(keys, _code(*given)))

    return lambda sample: of_slots(allowed[sample], int(draft.problem.lengths[sample]))


def _code(number: np.ndarray, width: np.ndarray, first: np.ndarray) -> np.ndarray:
    """One integer for (round, width, first); worlds stay far below 2^24 ranks."""
    return (number << 48) | (width << 24) | first


def places(draft: Draft, shapes: tuple[int, ...]) -> Candidates:
    """Every block pair of these shapes in every round."""
    rounds = np.arange(draft.rounds)
    number, shape, pair = [], [], []
    for each in shapes:
        count = len(draft.pairs(each).child_first)
        number.append(np.repeat(rounds, count))
        shape.append(np.full(count * draft.rounds, each))
        pair.append(np.tile(np.arange(count), draft.rounds))
    return Candidates(*(np.concatenate(part) for part in (number, shape, pair)))
