"""Policies with parent = child: `static` (one width for the run) and `dynamic` (a width for each sample)."""

from __future__ import annotations

import heapq
from functools import partial
from itertools import product

import numpy as np

from raypack.planning.bounds import least_time
from raypack.planning.greedy import cheapest_within, list_schedule
from raypack.planning.grid import cover
from raypack.planning.problem import Problem
from raypack.planning.refine import refine, worth_searching
from raypack.planning.rounds import mix_rounds, stack_rounds
from raypack.planning.rules import free
from raypack.planning.table import Table

STRETCHES = (1.0, 1.003, 1.01, 1.02, 1.04, 1.08, 1.15, 1.3, 1.6)
"""Factors on the fluid optimum that widths are chosen for; the best plan is kept."""


def static_table(problem: Problem) -> Table:
    """The least width that holds the longest sample the run allows, everywhere; longest samples placed first."""
    equal = problem.equal_shapes
    longest = np.maximum(problem.longest, problem.lengths[:1])
    fits = equal.fits(longest)[0]
    if not fits.any():
        fits = equal.fits(problem.lengths[:1])[0]
    width = int(equal.parent[fits.argmax()])
    tiles = cover(problem.topology, width)
    column = {int(w): i for i, w in enumerate(equal.parent)}
    unique, index = np.unique(problem.lengths, return_inverse=True)
    seconds, fit = equal.seconds(unique), equal.fits(unique)
    kinds = sorted({b.width for b in tiles}, reverse=True)
    heaps = {w: [(0.0, b.first) for b in tiles if b.width == w] for w in kinds}
    first, widths = np.empty(len(index), dtype=np.int64), np.empty(len(index), dtype=np.int64)
    for item, row in enumerate(index.tolist()):
        options = [(heaps[w][0][0] + seconds[row, column[w]], -w) for w in kinds if fit[row, column[w]]]
        value, w = min(options)
        at = heaps[-w][0][1]
        heapq.heapreplace(heaps[-w], (value, at))
        first[item], widths[item] = at, -w
    rounds = stack_rounds(problem, problem.lengths, first, widths, np.zeros(problem.topology.world, dtype=np.int64))
    return problem.table(rounds, first, widths, first, widths)


def dynamic_table(problem: Problem) -> Table:
    """Least-area widths under a time limit, list scheduling, then rounds in two styles; the best of several limits."""
    equal = problem.equal_shapes
    unique, index, counts = np.unique(problem.lengths, return_inverse=True, return_counts=True)
    seconds = np.where(equal.fits(unique), equal.seconds(unique), np.inf)
    # A block is busy on all its ranks for as long as the sample takes: that, not the floor, is what a width costs.
    area = equal.seconds(unique) * equal.parent
    time = least_time(seconds, area, counts, problem.topology.world)
    best = static_table(problem)
    best_seconds, seen = problem.judge(best), set()
    # With few samples one width for most of them can leave less waiting than the least areas do.
    least_widths = range(len(equal)) if worth_searching(problem) else (0,)
    for stretch, least in product(STRETCHES, least_widths):
        allowed = np.where(equal.parent >= equal.parent[least], seconds, np.inf)
        choice = cheapest_within(allowed, area, time * stretch)
        reach = allowed[np.arange(len(choice)), choice]
        if not np.isfinite(reach).all() or choice.tobytes() in seen:
            continue
        seen.add(choice.tobytes())
        for table in _candidates(problem, equal.parent[choice][index], reach[index]):
            value = problem.judge(table)
            if value < best_seconds:
                best, best_seconds = table, value
    if worth_searching(problem):
        best, _ = refine(problem, best, partial(free, equal=True))
    return best


def _candidates(problem: Problem, widths: np.ndarray, seconds: np.ndarray) -> list[Table]:
    """Plans for given widths: packs of one width stacked widest first, and mixed widths in few rounds."""
    topology, lengths = problem.topology, problem.lengths
    blocks = {int(w): topology.blocks_of_width(int(w)) for w in np.unique(widths)}
    first = list_schedule(widths, seconds, blocks, np.zeros(topology.world), entry_seconds(problem))
    depth = np.zeros(topology.world, dtype=np.int64)
    stacked = stack_rounds(problem, lengths, first, widths, depth)
    mixed = mix_rounds(problem, lengths, first, widths)
    return [problem.table(rounds, first, widths, first, widths) for rounds in (stacked, mixed)]


def entry_seconds(problem: Problem) -> dict[int, float]:
    """What one more pack of each width costs besides its samples: its latencies and `round_seconds`."""
    equal = problem.equal_shapes
    fixed = equal.latency + problem.costs.cluster.round_seconds
    return dict(zip(equal.parent.tolist(), fixed.tolist(), strict=True))
