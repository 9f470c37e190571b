"""Policies with parent = child: `static` (one width for the run) and `dynamic` (a width for each sample)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from raypack.plan.grid import cover
from raypack.plan.table import Table
from raypack.plan.topology import Block
from raypack.planning.bounds import least_time
from raypack.planning.greedy import cheapest_within, list_schedule, mix_rounds, stack_rounds
from raypack.planning.problem import Problem
from raypack.planning.search.improve import few_samples, refine, worth_searching
from raypack.planning.search.rules import free

STRETCHES = (1.0, 1.003, 1.01, 1.02, 1.04, 1.08, 1.15, 1.3, 1.6)
"""Factors on the fluid optimum that widths are chosen for; the best plan is kept."""


KEPT = 3
"""Schedules of the least makespan that are cut into rounds and judged, where there are many samples."""

MORE_ROUNDS = 3
"""Numbers of rounds tried, from the least that the cap allows, where all ranks leave a round together."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Blocks of all samples: int64 arrays [samples]. `rounds` is None where they are not cut into rounds yet."""

    first: np.ndarray
    widths: np.ndarray
    makespan: float
    rounds: np.ndarray | None = None


def static_table(problem: Problem) -> Table:
    """The least width that holds the longest sample the run allows, everywhere; longest samples placed first."""
    equal = problem.equal_shapes
    longest = np.maximum(problem.longest, problem.lengths[:1])
    fits = equal.fits(longest)[0]
    if not fits.any():
        fits = equal.fits(problem.lengths[:1])[0]
    return tile_table(problem, cover(problem.topology, int(equal.parent[fits.argmax()])))


def tile_table(problem: Problem, tiles: tuple[Block, ...]) -> Table:
    """Samples on disjoint blocks with parent = child: longest first where they end first, then cut into rounds.

    The cap is kept wherever each sample alone keeps it on some of the tiles.
    """
    best, best_seconds = None, np.inf
    if not problem.meets_in_packs:
        for rounds in round_counts(problem):
            first, widths, number = _on_tiles(problem, tiles, rounds)
            table = problem.table(number, first, widths, first, widths)
            if (seconds := problem.judge(table)) < best_seconds:
                best, best_seconds = table, seconds
    if best is None:
        first, widths, _ = _on_tiles(problem, tiles, 1)
        depth = np.zeros(problem.topology.world, dtype=np.int64)
        number = stack_rounds(problem, problem.lengths, first, widths, depth)
        best = problem.table(number, first, widths, first, widths)
    return best


def _on_tiles(problem: Problem, tiles: tuple[Block, ...], rounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each sample on the tile (of any round) where it ends first: first rank, width and round of each."""
    equal, world = problem.equal_shapes, problem.topology.world
    unique, index = np.unique(problem.lengths, return_inverse=True)
    kinds = sorted({b.width for b in tiles}, reverse=True)
    columns = [int(np.flatnonzero(equal.parent == w)[0]) for w in kinds]
    seconds = np.where(equal.fits(unique), equal.seconds(unique), np.inf)[:, columns].tolist()
    heaps = [[(0.0, k * world + b.first) for k in range(rounds) for b in tiles if b.width == w] for w in kinds]
    chosen, kind = np.empty(len(index), dtype=np.int64), np.empty(len(index), dtype=np.int64)
    for item, row in enumerate(index.tolist()):
        ends = [heap[0][0] + cost for heap, cost in zip(heaps, seconds[row], strict=True)]
        at = ends.index(min(ends))
        chosen[item], kind[item] = heaps[at][0][1], at
        heapq.heapreplace(heaps[at], (ends[at], heaps[at][0][1]))
    return chosen % world, np.array(kinds)[kind], chosen // world


def dynamic_table(problem: Problem) -> Table:
    """Least-area widths under a time limit, list scheduling, then rounds in two styles; the best of several limits."""
    schedules = sorted(_schedules(problem), key=lambda schedule: schedule.makespan)
    if not few_samples(problem):
        schedules = schedules[:KEPT]
    tables = [static_table(problem)]
    for schedule in schedules:
        tables.extend(_cut(problem, schedule))
    best = best_of(problem, tables)
    if worth_searching(problem):
        best, _ = refine(problem, best, partial(free, equal=True))
    return best


def best_of(problem: Problem, tables: list[Table]) -> Table:
    """The first of the quickest candidates."""
    return min(tables, key=problem.judge)


def _schedules(problem: Problem) -> list[Schedule]:
    """Widths for several time limits, and with few samples several least widths, scheduled by list."""
    equal, world = problem.equal_shapes, problem.topology.world
    unique, index, counts = np.unique(problem.lengths, return_inverse=True, return_counts=True)
    seconds = np.where(equal.fits(unique), equal.seconds(unique), np.inf)
    # A block is busy on all its ranks for as long as the sample takes: that, not the floor, is what a width costs.
    area = equal.seconds(unique) * equal.parent
    time = least_time(seconds, area, counts, world)
    # With few samples one width for most of them can leave less waiting than the least areas do.
    least_widths = range(len(equal)) if few_samples(problem) else (0,)
    found, seen = [], set()
    for rounds, stretch, least in product(round_counts(problem), STRETCHES, least_widths):
        allowed = np.where(equal.parent >= equal.parent[least], seconds, np.inf)
        choice = cheapest_within(allowed, area, time / rounds * stretch)
        reach = allowed[np.arange(len(choice)), choice]
        key = (rounds, choice.tobytes())
        if not np.isfinite(reach).all() or key in seen:
            continue
        seen.add(key)
        widths = equal.parent[choice][index]
        blocks = {int(w): in_rounds(problem, int(w), rounds) for w in np.unique(widths)}
        load = np.zeros(world * rounds)
        chosen = list_schedule(widths, reach[index], blocks, load, entry_seconds(problem))
        makespan = float(load.max()) * rounds
        number = None if problem.meets_in_packs else chosen // world
        found.append(Schedule(chosen % world, widths, makespan, number))
    return found


def round_counts(problem: Problem) -> range:
    """Rounds to schedule over. Where packs need not wait for others a rank's work is cut into rounds afterwards."""
    if problem.meets_in_packs:
        return range(1, 2)
    least = -(-int(problem.lengths.sum()) // (problem.cap * problem.topology.world))
    return range(least, least + MORE_ROUNDS)


def in_rounds(problem: Problem, width: int, rounds: int) -> list[Block]:
    """Blocks of a width in every round; round k's ranks are numbered from k x world."""
    world = problem.topology.world
    blocks = problem.topology.blocks_of_width(width)
    return [Block(k * world + b.first, width) for k in range(rounds) for b in blocks]


def _cut(problem: Problem, schedule: Schedule) -> list[Table]:
    """Plans of a schedule: packs of one width stacked widest first, and mixed widths in few rounds."""
    first, widths, lengths = schedule.first, schedule.widths, problem.lengths
    if schedule.rounds is not None:
        return [problem.table(schedule.rounds, first, widths, first, widths)]
    depth = np.zeros(problem.topology.world, dtype=np.int64)
    cuts = [stack_rounds(problem, lengths, first, widths, depth)]
    if few_samples(problem):
        cuts.append(mix_rounds(problem, lengths, first, widths))
    return [problem.table(rounds, first, widths, first, widths) for rounds in cuts]


def entry_seconds(problem: Problem) -> dict[int, float]:
    """What one more pack of each width costs besides its samples: its latencies and `round_seconds`."""
    equal = problem.equal_shapes
    fixed = equal.latency + problem.costs.cluster.round_seconds
    return dict(zip(equal.parent.tolist(), fixed.tolist(), strict=True))
