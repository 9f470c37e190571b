"""Policies with parent = child: `static` (one width for the run) and `dynamic` (a width for each sample)."""

from __future__ import annotations

import heapq

import numpy as np

from raypack.planning.bounds import least_time
from raypack.planning.greedy import cheapest_within, first_fit, list_schedule
from raypack.planning.grid import cover
from raypack.planning.problem import Problem
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
    return stack_rounds(problem, first, widths)


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
    for stretch in STRETCHES:
        choice = cheapest_within(seconds, area, time * stretch)
        key = choice.tobytes()
        if key in seen:
            continue
        seen.add(key)
        for table in _candidates(problem, equal.parent[choice][index], seconds[np.arange(len(choice)), choice][index]):
            value = problem.judge(table)
            if value < best_seconds:
                best, best_seconds = table, value
    return best


def _candidates(problem: Problem, widths: np.ndarray, seconds: np.ndarray) -> list[Table]:
    """Plans for given widths: packs of one width stacked widest first, and mixed widths in few rounds."""
    equal, topology = problem.equal_shapes, problem.topology
    entry = {
        int(w): float(latency) + problem.costs.cluster.round_seconds
        for w, latency in zip(equal.parent, equal.latency, strict=True)
    }
    blocks = {int(w): topology.blocks_of_width(int(w)) for w in np.unique(widths)}
    first = list_schedule(widths, seconds, blocks, np.zeros(topology.world), entry)
    return [stack_rounds(problem, first, widths), mix_rounds(problem, first, widths)]


def capacity(problem: Problem, width: int) -> int:
    """Tokens that a block of `width` can hold in one round where parent = child = the block."""
    equal = problem.equal_shapes
    at = int(np.flatnonzero(equal.parent == width)[0])
    held = max(float(equal.full_held[at]), float(equal.sparse_held[at]))
    return min(problem.cap * width, int(problem.cap / held * (1 + 1e-12)) if held else problem.cap * width)


def stack_rounds(problem: Problem, first: np.ndarray, widths: np.ndarray) -> Table:
    """One width per pack and round, widest first: no rank waits inside a pack, at the price of more rounds."""
    depth = np.zeros(problem.topology.world, dtype=np.int64)
    rounds = np.empty(len(first), dtype=np.int64)
    order = np.lexsort((np.arange(len(first)), first, -widths))
    edges = np.flatnonzero(np.diff(first[order], prepend=-1) | np.diff(widths[order], prepend=-1))
    for start, end in zip(edges.tolist(), [*edges[1:].tolist(), len(order)], strict=True):
        items = order[start:end]
        width, at = int(widths[items[0]]), int(first[items[0]])
        base = int(depth[at : at + width].max())
        bins = first_fit(problem.lengths[items].tolist(), capacity(problem, width))
        rounds[items] = base + np.array(bins)
        depth[at : at + width] = base + max(bins) + 1
    return problem.table(rounds, first, widths, first, widths)


def mix_rounds(problem: Problem, first: np.ndarray, widths: np.ndarray) -> Table:
    """Widths side by side and nested in each round, first fit by the memory of every rank."""
    equal = problem.equal_shapes
    column = np.searchsorted(equal.parent, widths)
    held = np.maximum(equal.full_held, equal.sparse_held)[column]
    need = problem.lengths * np.maximum(1 / widths, held)
    # One token more for the shards that get an extra one in nested blocks.
    need = need + (widths > 1)
    room: list[np.ndarray] = []
    rounds = np.empty(len(first), dtype=np.int64)
    order = np.lexsort((np.arange(len(first)), -widths))
    spans = zip(order.tolist(), first[order].tolist(), widths[order].tolist(), need[order].tolist(), strict=True)
    for item, at, width, amount in spans:
        number = next((k for k, free in enumerate(room) if free[at : at + width].min() >= amount), len(room))
        if number == len(room):
            room.append(np.full(problem.topology.world, float(problem.cap)))
        room[number][at : at + width] -= amount
        rounds[item] = number
    return problem.table(rounds, first, widths, first, widths)
