"""Policy `joint`: a parent and a child for each sample (design section 6).

Constructive part: every sample takes the shape of least area that is quick enough; samples whose parent is wider than
their child are placed first, parent by total load and child by cheap load, the others fill up by list scheduling.
Rounds mix widths, so that short samples use what a wide pack leaves free.
"""

from __future__ import annotations

import numpy as np

from raypack.parallel.topology import Block
from raypack.planning.children import inner_blocks
from raypack.planning.greedy import cheapest_within, list_schedule
from raypack.planning.problem import Problem
from raypack.planning.table import Table

STRETCHES = (1.0, 1.01, 1.03, 1.08, 1.2, 1.5)
"""Factors on the area bound that shapes are chosen for."""

MIX = 0.5
"""Weight of intra against inter seconds in the area that shapes are chosen by."""


def joint_table(problem: Problem, bases: list[Table]) -> Table:
    """The best of `bases` (plans of the narrower policies) and of the constructive plans."""
    values = [problem.judge(table) for table in bases]
    best_seconds = min(values)
    best = bases[values.index(best_seconds)]
    unique, index = np.unique(problem.lengths, return_inverse=True)
    shapes = problem.shapes
    seconds = np.where(shapes.fits(unique), shapes.seconds(unique), np.inf)
    area = shapes.area(unique, MIX)
    seen = set()
    for stretch in STRETCHES:
        choice = cheapest_within(seconds, area, problem.bounds.area * stretch)
        if choice.tobytes() in seen:
            continue
        seen.add(choice.tobytes())
        table = construct(problem, choice[index])
        value = problem.judge(table)
        if value < best_seconds:
            best, best_seconds = table, value
    return best


def construct(problem: Problem, choice: np.ndarray) -> Table:
    """Place every sample with its chosen shape (index into `problem.shapes`), then cut into rounds first-fit."""
    shapes, lengths, topology = problem.shapes, problem.lengths, problem.topology
    parent_width, child_width = shapes.parent[choice], shapes.child[choice]
    count = np.arange(len(choice))
    full = problem.costs.pairs(lengths) * shapes.full[choice]
    cheap = shapes.cheap_seconds(lengths)[count, choice] if len(choice) <= 4096 else _cheap(problem, choice)
    exchange = lengths * shapes.full_exchange[choice]
    parent_first = np.empty(len(choice), dtype=np.int64)
    child_first = np.empty(len(choice), dtype=np.int64)
    load = np.zeros(topology.world)
    cheap_load = np.zeros(topology.world)
    split = np.flatnonzero(parent_width > child_width)
    order = split[np.lexsort((split, -(full + cheap)[split], -parent_width[split]))]
    inner: dict[Block, dict[int, list[Block]]] = {}
    for row in order.tolist():
        parent = min(
            topology.blocks_of_width(int(parent_width[row])), key=lambda b: (load[b.first : b.end].sum(), b.first)
        )
        if parent not in inner:
            inner[parent] = inner_blocks(problem, parent)
        local = inner[parent].get(int(child_width[row]))
        choices = local or [b for b in topology.blocks_of_width(int(child_width[row])) if parent.contains(b)]
        child = min(choices, key=lambda b: (cheap_load[b.first : b.end].max(), b.first))
        load[parent.first : parent.end] += full[row] + exchange[row]
        load[child.first : child.end] += cheap[row]
        cheap_load[child.first : child.end] += cheap[row]
        parent_first[row], child_first[row] = parent.first, child.first
    rest = np.flatnonzero(parent_width == child_width)
    blocks = {int(w): topology.blocks_of_width(int(w)) for w in np.unique(parent_width[rest])}
    whole = (full + cheap + exchange)[rest]
    parent_first[rest] = child_first[rest] = list_schedule(parent_width[rest], whole, blocks, load, {})
    rounds = first_fit_rounds(problem, choice, parent_first, child_first)
    return problem.table(rounds, parent_first, parent_width, child_first, child_width)


def _cheap(problem: Problem, choice: np.ndarray) -> np.ndarray:
    shapes, lengths = problem.shapes, problem.lengths
    per_token = shapes.linear / shapes.child + shapes.sparse_exchange
    return problem.costs.window_pairs(lengths) * shapes.window[choice] + lengths * per_token[choice]


def first_fit_rounds(
    problem: Problem, choice: np.ndarray, parent_first: np.ndarray, child_first: np.ndarray
) -> np.ndarray:
    """Lowest round in which the parent's ranks can hold the heads and the child's ranks the tokens. [samples]."""
    shapes, lengths, cap, world = problem.shapes, problem.lengths, float(problem.cap), problem.topology.world
    parent_width, child_width = shapes.parent[choice], shapes.child[choice]
    # One token more for the shards that get an extra one in nested blocks.
    tokens = lengths / child_width + (child_width > 1)
    above, below = lengths * shapes.full_held[choice], lengths * shapes.sparse_held[choice]
    rounds = np.empty(len(choice), dtype=np.int64)
    room: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    columns = (parent_first, parent_width, child_first, child_width, tokens, above, below)
    order = np.lexsort((np.arange(len(choice)), -parent_width))
    for row, p, pw, c, cw, t, a, b in zip(order.tolist(), *(x[order].tolist() for x in columns), strict=True):
        fitting = (
            number
            for number, (free, full, sparse) in enumerate(room)
            if min(free[c : c + cw].min() - t, sparse[c : c + cw].min() - b, full[p : p + pw].min() - a) >= 0
        )
        number = next(fitting, len(room))
        if number == len(room):
            room.append((np.full(world, cap), np.full(world, cap), np.full(world, cap)))
        free, full, sparse = room[number]
        free[c : c + cw] -= t
        sparse[c : c + cw] -= b
        full[p : p + pw] -= a
        rounds[row] = number
    return rounds
