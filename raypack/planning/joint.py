"""Policy `joint`: a parent and a child for each sample (design section 6).

Constructive part, for several time limits around the bound: every sample takes the shape that keeps ranks busy least
among those that are quick enough. Samples whose parent crosses nodes are placed first, each where the step is
shortest; short samples fill what their packs leave free; the rest is scheduled by list on top, packs of one width after
another. Then local search, where the step has few enough samples for it to matter.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from raypack.planning.fill import fill, share
from raypack.planning.greedy import cheapest_within, list_schedule
from raypack.planning.neighbours import finish, values
from raypack.planning.problem import Problem
from raypack.planning.refine import refine, worth_searching
from raypack.planning.rounds import stack_rounds
from raypack.planning.rules import free, places
from raypack.planning.state import State
from raypack.planning.table import Table
from raypack.planning.uniform import entry_seconds

STRETCHES = (1.0, 1.01, 1.03, 1.08, 1.2)
"""Factors on the area bound that shapes are chosen for."""

LIFTS = (0.0, 0.006, 0.01, 0.02, 0.03, 0.045)
"""How far full parts of wide packs may grow by filling, as shares of the area bound."""

ROUNDS = 2
"""Rounds that samples with crossing parents may use."""


def joint_table(problem: Problem, bases: list[Table]) -> Table:
    """The best of `bases` (plans of the narrower policies) and of the constructive plans, refined."""
    values_ = [problem.judge(table) for table in bases]
    best_seconds = min(values_)
    best = bases[values_.index(best_seconds)]
    for table in construct(problem):
        seconds = problem.judge(table)
        if seconds < best_seconds:
            best, best_seconds = table, seconds
    if worth_searching(problem):
        best, _ = refine(problem, best, partial(free, equal=False))
    return best


def construct(problem: Problem) -> list[Table]:
    """Plans for several time limits and fillings; none where no sample wants a crossing parent."""
    shapes = problem.shapes
    unique, index = np.unique(problem.lengths, return_inverse=True)
    seconds = np.where(shapes.fits(unique), shapes.seconds(unique), np.inf)
    used = problem.used(unique)
    node = max(problem.topology.nodes)
    tables, seen = [], set()
    for stretch in STRETCHES:
        limit = problem.bounds.area * stretch
        choice = cheapest_within(seconds, used, limit)[index]
        wide = np.flatnonzero(shapes.parent[choice] > node)
        key = (tuple(wide.tolist()), tuple(choice[wide].tolist()))
        if not len(wide) or key in seen:
            continue
        seen.add(key)
        state = place_wide(problem, wide, limit)
        rest = np.setdiff1d(np.arange(len(index)), wide)
        tables.extend(_fillings(problem, state, rest))
    return tables


def place_wide(problem: Problem, wide: np.ndarray, limit: float) -> State:
    """The samples `wide`, longest first, each at the place of least rank-seconds that keeps the step within `limit`."""
    state = State(problem, ROUNDS)
    shapes, lengths = problem.shapes, problem.lengths
    for sample in wide.tolist():
        n = lengths[sample : sample + 1]
        used, seconds, fits = problem.used(n)[0], shapes.seconds(n)[0], shapes.fits(n)[0]
        quick = fits & (seconds <= max(limit, seconds[fits].min() * (1 + 1e-9)))
        options = np.flatnonzero(quick & (used <= 1.3 * used[quick].min()))
        found = places(state, tuple(options.tolist()))
        price = values(state, sample, found)
        late = price.seconds > limit
        cost = np.where(late, price.seconds * problem.topology.world, used[found.shape])
        at = np.lexsort((np.arange(len(found)), price.objective, cost, late))[0]
        state.put(sample, found.at(int(at)))
    return state


def _fillings(problem: Problem, wide: State, rest: np.ndarray) -> list[Table]:
    """The wide samples with the rest filled in and stacked on top; with and without others sharing their packs."""
    equal = problem.equal_shapes
    lengths = problem.lengths[rest]
    seconds = np.where(equal.fits(lengths), equal.seconds(lengths), np.inf)
    busy = equal.seconds(lengths) * equal.parent
    choice = cheapest_within(seconds, busy, problem.bounds.area)
    single = equal.parent[choice] == 1
    shared = wide.copy()
    apart = share(shared, rest.tolist(), busy[np.arange(len(rest)), choice], problem.bounds.area * 1.02)
    starts = [(wide, np.ones(len(rest), dtype=bool))]
    if len(apart) < len(rest):
        starts.append((shared, np.isin(rest, apart)))
    tables = []
    for base, out in starts:
        quickest = float("inf")
        for lift in LIFTS:
            state = base.copy()
            left = fill(state, rest[single & out].tolist(), lift * problem.bounds.area)
            tables.append(stack_rest(problem, state, np.union1d(rest[~single & out], left).astype(np.int64)))
            value = problem.judge(tables[-1])
            if value > quickest:
                break
            quickest = value
    return tables


def stack_rest(problem: Problem, state: State, rest: np.ndarray) -> Table:
    """Samples of `rest` with parent = child on top of the packs of `state`, in rounds of their own."""
    equal, topology = problem.equal_shapes, problem.topology
    lengths = problem.lengths[rest]
    seconds = np.where(equal.fits(lengths), equal.seconds(lengths), np.inf)
    choice = cheapest_within(seconds, equal.seconds(lengths) * equal.parent, problem.bounds.area)
    widths, own = equal.parent[choice], seconds[np.arange(len(choice)), choice]
    load, depth = finish(state), state.depth()
    blocks = {int(w): topology.blocks_of_width(int(w)) for w in np.unique(widths)}
    first = list_schedule(widths, own, blocks, load, entry_seconds(problem))
    rounds = stack_rounds(problem, lengths, first, widths, depth)
    return state.table((rest, rounds, first, widths))
