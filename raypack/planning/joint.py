"""Policy `joint`: a parent and a child for each sample (docs/planning.md).

Constructive part, for several time limits around the bound: every sample takes the shape that keeps ranks busy least
among those that are quick enough. Samples whose parent crosses nodes are placed first, each where the step is
shortest; short samples fill what their packs leave free; the rest is scheduled by list on top, packs of one width after
another. Then local search, where the step has few enough samples for it to matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from raypack.plan.table import Table
from raypack.planning.balance import balanced_tables
from raypack.planning.few import improve_few, is_few
from raypack.planning.fill import fill, share
from raypack.planning.greedy import cheapest_within, list_schedule
from raypack.planning.neighbours import finish, idlest, values
from raypack.planning.problem import Problem
from raypack.planning.refine import refine, worth_searching
from raypack.planning.rounds import stack_rounds
from raypack.planning.rules import free, places
from raypack.planning.state import State
from raypack.planning.uniform import entry_seconds, in_rounds, round_counts

STRETCHES = (1.0, 1.01, 1.03, 1.08, 1.2)
"""Factors on the area bound that shapes are chosen for."""

LIFTS = (0.0, 0.006, 0.01, 0.02, 0.03, 0.045)
"""How far full parts of wide packs may grow by filling, as shares of the area bound."""

MOST_PLACES = 1024
"""Places priced for one sample."""

ROUNDS = 2
"""Rounds that samples with crossing parents may use where packs of different rounds may overlap in time."""


def joint_table(problem: Problem, bases: list[Table]) -> Table:
    """The best of `bases` (plans of the narrower policies) and of the constructive plans, refined."""
    values_ = [problem.judge(table) for table in bases]
    best_seconds = min(values_)
    best = bases[values_.index(best_seconds)]
    for table in construct(problem) + (balanced_tables(problem) if problem.waits_in_layers else []):
        seconds = problem.judge(table)
        if seconds < best_seconds:
            best, best_seconds = table, seconds
    if worth_searching(problem) and is_few(problem):
        best = improve_few(problem, best)
    elif worth_searching(problem):
        best, _ = refine(problem, best, partial(free, equal=False))
    return best


def construct(problem: Problem) -> list[Table]:
    """Plans for several time limits and fillings; none where no sample wants a crossing parent."""
    shapes = problem.shapes
    unique, index = np.unique(problem.lengths, return_inverse=True)
    seconds = np.where(shapes.fits(unique), shapes.seconds(unique), np.inf)
    used = problem.used(unique)
    node = max(problem.topology.nodes)
    counts = (ROUNDS,) if problem.meets_in_packs else round_counts(problem)
    tables, seen = list[Table](), set()
    for rounds, stretch in product(counts, STRETCHES):
        limit = problem.bounds.area * stretch
        choice = cheapest_within(seconds, used, _round_limit(problem, limit, rounds))[index]
        wide = np.flatnonzero(shapes.parent[choice] > node)
        key = (rounds, tuple(wide.tolist()), tuple(choice[wide].tolist()))
        if not len(wide) or key in seen:
            continue
        seen.add(key)
        state = place_wide(problem, wide, limit, rounds)
        rest = np.setdiff1d(np.arange(len(index)), wide)
        tables.extend(_fillings(problem, state, rest))
    return tables


def _round_limit(problem: Problem, limit: float, rounds: int) -> float:
    """Seconds that one sample may take where the step may take `limit`."""
    return limit if problem.meets_in_packs else limit / rounds


def place_wide(problem: Problem, wide: np.ndarray, limit: float, rounds: int) -> State:
    """The samples `wide`, longest first, each at the place of least rank-seconds that keeps the step within `limit`."""
    state = State(problem, rounds)
    shapes, lengths = problem.shapes, problem.lengths
    own = _round_limit(problem, limit, rounds)
    for sample in wide.tolist():
        n = lengths[sample : sample + 1]
        used, seconds, fits = problem.used(n)[0], shapes.seconds(n)[0], shapes.fits(n)[0]
        quick = fits & (seconds <= max(own, seconds[fits].min() * (1 + 1e-9)))
        options = np.flatnonzero(quick & (used <= 1.3 * used[quick].min()))
        found = idlest(state, places(state, tuple(options.tolist())), MOST_PLACES)
        price = values(state, sample, found)
        late = price.seconds > limit
        cost = np.where(late, price.seconds * problem.topology.world, used[found.shape])
        at = np.lexsort((np.arange(len(found)), price.objective, cost, late))[0]
        state.put(sample, found.at(int(at)))
    return state


@dataclass(frozen=True, eq=False)
class _Rest:
    """Samples that get parent = child: their rows, and width, seconds and rank-seconds of each: arrays [samples]."""

    rows: np.ndarray
    widths: np.ndarray
    seconds: np.ndarray
    busy: np.ndarray

    def select(self, rows: np.ndarray | list[int]) -> _Rest:
        kept = np.isin(self.rows, rows)
        return _Rest(self.rows[kept], self.widths[kept], self.seconds[kept], self.busy[kept])


def _rest(problem: Problem, rows: np.ndarray, rounds: int) -> _Rest:
    equal = problem.equal_shapes
    unique, index = np.unique(problem.lengths[rows], return_inverse=True)
    seconds = np.where(equal.fits(unique), equal.seconds(unique), np.inf)
    busy = equal.seconds(unique) * equal.parent
    choice = cheapest_within(seconds, busy, _round_limit(problem, problem.bounds.area, rounds))
    each = np.arange(len(unique)), choice
    return _Rest(rows, equal.parent[choice][index], seconds[each][index], busy[each][index])


def _fillings(problem: Problem, wide: State, rows: np.ndarray) -> list[Table]:
    """The wide samples with the rest filled in and put on top; with and without others sharing their packs."""
    rest = _rest(problem, rows, wide.rounds)
    shared = wide.copy()
    apart = share(shared, rows.tolist(), rest.busy, problem.bounds.area * 1.02)
    starts = [(wide, rest)]
    if len(apart) < len(rows):
        starts.append((shared, rest.select(apart)))
    tables = list[Table]()
    for base, out in starts:
        quickest = float("inf")
        singles, others = out.rows[out.widths == 1], out.rows[out.widths > 1]
        for lift in LIFTS:
            state = base.copy()
            left = fill(state, singles.tolist(), lift * problem.bounds.area)
            tables.append(_on_top(problem, state, out.select([*others.tolist(), *left])))
            value = problem.judge(tables[-1])
            if value > quickest:
                break
            quickest = value
    return tables


def _on_top(problem: Problem, state: State, rest: _Rest) -> Table:
    """The rest by list: after the packs of `state` in rounds of their own, or evenly over its rounds beside them."""
    topology, lengths = problem.topology, problem.lengths[rest.rows]
    rounds = 1 if problem.meets_in_packs else state.rounds
    blocks = {int(w): in_rounds(problem, int(w), rounds) for w in np.unique(rest.widths)}
    beside = [state.packs(k).seconds for k in range(rounds)]
    load = finish(state) if problem.meets_in_packs else np.concatenate(beside)
    first = list_schedule(rest.widths, rest.seconds, blocks, load, entry_seconds(problem))
    number, first = first // topology.world, first % topology.world
    if problem.meets_in_packs:
        number = stack_rounds(problem, lengths, first, rest.widths, state.depth())
    return state.table((rest.rows, number, first, rest.widths))
