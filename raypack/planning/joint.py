"""Policy `joint`: a parent and a child for each sample (docs/planning.md).

Constructive part: every sample takes the shape that keeps ranks busy least among those that the area bound leaves time
for. Samples whose parent crosses nodes are placed first, each where the step is shortest; short samples fill what their
packs leave free; the rest is scheduled by list on top, packs of one width after another. Then local search, where the
step has few enough samples for it to matter.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np

from raypack.plan.table import Table
from raypack.planning.greedy import cheapest_within, list_schedule, stack_rounds
from raypack.planning.lockstep import balanced_tables
from raypack.planning.problem import Problem
from raypack.planning.search.draft import Draft
from raypack.planning.search.few import improve_few, is_few
from raypack.planning.search.improve import refine, worth_searching
from raypack.planning.search.neighbours import Candidates, finish, idlest, values
from raypack.planning.search.profiles import FULL, SPARSE_HELD
from raypack.planning.search.rules import free, places
from raypack.planning.uniform import entry_seconds, in_rounds, round_counts

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
    """Plans for several fillings and numbers of rounds; none where no sample wants a crossing parent."""
    shapes = problem.shapes
    unique, index = np.unique(problem.lengths, return_inverse=True)
    seconds = np.where(shapes.fits(unique), shapes.seconds(unique), np.inf)
    used = problem.used(unique)
    node = max(problem.topology.nodes)
    counts = (ROUNDS,) if problem.meets_in_packs else round_counts(problem)
    tables, limit = list[Table](), problem.bounds.area
    for rounds in counts:
        choice = cheapest_within(seconds, used, _round_limit(problem, limit, rounds))[index]
        wide = np.flatnonzero(shapes.parent[choice] > node)
        if not len(wide):
            continue
        draft = place_wide(problem, wide, limit, rounds)
        rest = np.setdiff1d(np.arange(len(index)), wide)
        tables.extend(_fillings(problem, draft, rest))
    return tables


def _round_limit(problem: Problem, limit: float, rounds: int) -> float:
    """Seconds that one sample may take where the step may take `limit`."""
    return limit if problem.meets_in_packs else limit / rounds


def place_wide(problem: Problem, wide: np.ndarray, limit: float, rounds: int) -> Draft:
    """The samples `wide`, longest first, each at the place of least rank-seconds that keeps the step within `limit`."""
    draft = Draft(problem, rounds)
    shapes, lengths = problem.shapes, problem.lengths
    own = _round_limit(problem, limit, rounds)
    for sample in wide.tolist():
        n = lengths[sample : sample + 1]
        used, seconds, fits = problem.used(n)[0], shapes.seconds(n)[0], shapes.fits(n)[0]
        quick = fits & (seconds <= max(own, seconds[fits].min() * (1 + 1e-9)))
        options = np.flatnonzero(quick & (used <= 1.3 * used[quick].min()))
        found = idlest(draft, places(draft, tuple(options.tolist())), MOST_PLACES)
        price = values(draft, sample, found)
        late = price.seconds > limit
        cost = np.where(late, price.seconds * problem.topology.world, used[found.shape])
        at = np.lexsort((np.arange(len(found)), price.objective, cost, late))[0]
        draft.put(sample, found.at(int(at)))
    return draft


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


def _fillings(problem: Problem, wide: Draft, rows: np.ndarray) -> list[Table]:
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
            draft = base.copy()
            left = fill(draft, singles.tolist(), lift * problem.bounds.area)
            tables.append(_on_top(problem, draft, out.select([*others.tolist(), *left])))
            value = problem.judge(tables[-1])
            if value > quickest:
                break
            quickest = value
    return tables


def _on_top(problem: Problem, draft: Draft, rest: _Rest) -> Table:
    """The rest by list: after the packs of `draft` in rounds of their own, or evenly over its rounds beside them."""
    topology, lengths = problem.topology, problem.lengths[rest.rows]
    rounds = 1 if problem.meets_in_packs else draft.rounds
    blocks = {int(w): in_rounds(problem, int(w), rounds) for w in np.unique(rest.widths)}
    beside = [draft.packs(k).seconds for k in range(rounds)]
    load = finish(draft) if problem.meets_in_packs else np.concatenate(beside)
    first = list_schedule(rest.widths, rest.seconds, blocks, load, entry_seconds(problem))
    number, first = first // topology.world, first % topology.world
    if problem.meets_in_packs:
        number = stack_rounds(problem, lengths, first, rest.widths, draft.depth())
    return draft.table((rest.rows, number, first, rest.widths))


GAIN = 0.4
"""A sample joins a wide pack only where that takes less than this share of its own rank-seconds."""

MISSES = 12
"""Samples in a row that no pack wants before the rest is not asked."""


def fill(draft: Draft, samples: list[int], lift: float) -> list[int]:
    """Put one-rank samples (longest first) where wide packs leave room.

    A rank takes the longest sample that fits and whose full part, against its cheap part, is no larger than that of the
    rank's room: so both are used up together. The roomiest rank goes first.

    Args:
        lift: seconds that the full part of a pack may grow by.

    Returns:
        Samples that stay out, longest first.
    """
    problem = draft.problem
    single = problem.shapes.index(1, 1)
    one = problem.shapes.select(np.arange(len(problem.shapes)) == single)
    left = samples[::-1]
    lengths = problem.lengths[left]
    full, cheap = one.full_seconds(lengths)[:, 0], one.cheap_seconds(lengths)[:, 0]
    keys = list(zip(*(column.tolist() for column in (full, cheap, full / cheap, lengths)), strict=True))
    heap = _rooms(draft, lift)
    while heap and left:
        spare, number, rank, free, tokens = heapq.heappop(heap)
        limits = (free, -spare, free / -spare, tokens)
        # All four grow with the length, so the longest that fits stands just before the first that does not.
        at = min(bisect_right(keys, limit, key=itemgetter(k)) for k, limit in enumerate(limits)) - 1
        if at < 0:
            continue
        amount = keys.pop(at)
        draft.put(left.pop(at), (number, single, rank))
        heapq.heappush(heap, (spare + amount[1], number, rank, free - amount[0], tokens - amount[3]))
    return left[::-1]


def _rooms(draft: Draft, lift: float) -> list[tuple[float, int, int, float, float]]:
    """Heap of (- spare cheap seconds, round, rank, spare full seconds, tokens up to the cap), ranks of wide packs."""
    found = list[tuple[float, int, int, float, float]]()
    for number in range(draft.rounds):
        packs, load = draft.packs(number), draft.loads[number]
        cheap = packs.cheap - draft.cheap(load)
        full = packs.full + lift - load[FULL]
        tokens = draft.problem.cap - load[: SPARSE_HELD + 1].max(axis=0)
        for first, end in zip(packs.first.tolist(), packs.end.tolist(), strict=True):
            if end - first > 1:
                ranks = [rank for rank in range(first, end) if cheap[rank] > 0]
                found.extend((-float(cheap[r]), number, r, float(full[r]), float(tokens[r])) for r in ranks)
    heapq.heapify(found)
    return found


def share(draft: Draft, samples: list[int], own: np.ndarray, limit: float) -> list[int]:
    """Give samples a wide pack as parent where that takes fewer rank-seconds than they need on their own.

    Their full attention then lies evenly on the whole pack and their tokens where its children leave room, and their
    exchange uses links that the long samples leave idle.

    Args:
        samples: longest first.
        own: rank-seconds of each on a block of its own.
        limit: seconds that the step must not exceed.

    Returns:
        Samples that stay out, in order.
    """
    choices = _wide_packs(draft)
    world = draft.problem.topology.world
    left, misses = [], 0
    before = float(finish(draft).sum())
    for at, sample in enumerate(samples):
        if misses >= MISSES or not choices:
            left.extend(samples[at:])
            break
        found = Candidates(*(np.concatenate(part) for part in zip(*choices, strict=True)))
        price = values(draft, sample, found)
        cost = np.where(price.seconds <= limit, price.mean * world - before, np.inf)
        best = int(cost.argmin())
        if cost[best] < GAIN * own[at]:
            draft.put(sample, found.at(best))
            before = float(finish(draft).sum())
            misses = 0
        else:
            left.append(sample)
            misses += 1
    return left


def _wide_packs(draft: Draft) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Places (round, shape, pair) under a parent that is a whole pack across nodes, children inside nodes."""
    problem = draft.problem
    shapes, node = problem.shapes, max(problem.topology.nodes)
    found = []
    for number in range(draft.rounds):
        packs = draft.packs(number)
        for first, end in zip(packs.first.tolist(), packs.end.tolist(), strict=True):
            if end - first <= node:
                continue
            for shape in np.flatnonzero((shapes.parent == end - first) & shapes.local).tolist():
                pair = np.flatnonzero(draft.pairs(shape).parent_first == first)
                found.append((np.full(len(pair), number), np.full(len(pair), shape), pair))
    return found
