"""Policies `repack` and `repack+parents`: node-local children for the packs of `dynamic` (docs/planning.md).

In a pack all ranks share the full attention of all samples, whatever the children are; the cheap layers only see the
children. So the child solver balances cheap seconds alone: least-area child widths, then list scheduling on the
node-local blocks inside the pack. A pack that does not gain keeps its children. `repack+parents` also changes who
shares a pack: samples of one parent width are dealt anew by list scheduling on the cheap part (what the children must
balance) or on the full part, then the child solver runs again. Packs are as many and as wide as before.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from raypack.plan.grid import inner_blocks
from raypack.plan.table import Table
from raypack.plan.topology import Block
from raypack.planning.bounds import least_time
from raypack.planning.clock import pack_seconds
from raypack.planning.greedy import cheapest_within, list_schedule
from raypack.planning.load import load_round
from raypack.planning.problem import Problem
from raypack.planning.search.improve import refine, worth_searching
from raypack.planning.search.rules import same_packs, same_slots
from raypack.planning.shapes import Shapes

STRETCHES = (1.0, 1.1, 1.3)
"""Factors on the fluid optimum of the cheap part that child widths are chosen for: on the real lists one would do, in
lockstep on others three gain up to 5 %."""


def repack_table(problem: Problem, base: Table) -> Table:
    """`base` with node-local children wherever a pack gains by them; `base` itself where none does."""
    best = solve_children(problem, base)
    if worth_searching(problem) and (best.parent_width > 1).any():
        best, _ = refine(problem, best, same_packs, spare=0)
    return best


def solve_children(problem: Problem, base: Table) -> Table:
    """As `repack_table`, without local search."""
    best, best_seconds = base, problem.judge(base)
    every = [pack for pack in packs(base) if pack[1].width > 1]
    mixed = any(len(np.unique(base.parent_width[rows])) > 1 for rows, _ in every)
    for stretch, nested in product(STRETCHES, (False, True) if mixed else (True,)):
        table = better_packs(problem, best, with_children(problem, base, every, stretch, nested))
        seconds = problem.judge(table)
        if seconds < best_seconds:
            best, best_seconds = table, seconds
    return best


def with_children(
    problem: Problem, base: Table, every: list[tuple[np.ndarray, Block]], stretch: float, nested: bool
) -> Table:
    """New children in the packs `every`. `nested`: also for samples whose parent is narrower than the pack."""
    child_first, child_width = base.child_first.copy(), base.child_width.copy()
    local = problem.shapes.select(problem.shapes.local)
    load = np.zeros(problem.topology.world)
    for rows, pack in every:
        if len(rows) == 1:
            child_width[rows] = _alone(problem, int(problem.lengths[rows[0]]), pack.width)
            continue
        load[pack.first : pack.end] = 0.0
        keys = base.parent_first[rows] - base.parent_width[rows] * problem.topology.world
        for key in np.unique(keys).tolist():
            mine = rows[keys == key]
            parent = Block(int(base.parent_first[mine[0]]), int(base.parent_width[mine[0]]))
            if parent.width < pack.width and not nested:
                _keep(problem, base, mine, load)
            else:
                child_first[mine], child_width[mine] = place_children(problem, local, mine, parent, load, stretch)
    return replace(base, child_first=child_first, child_width=child_width)


def _alone(problem: Problem, length: int, width: int) -> int:
    """The child width, node-local or the whole parent, with which a sample alone in its pack is quickest."""
    shapes = problem.shapes
    n = np.array([length])
    usable = (shapes.parent == width) & (shapes.local | (shapes.child == width)) & shapes.fits(n)[0]
    if not usable.any():
        return width
    options = shapes.select(usable)
    # The widest of equals; the first block of its width inside the parent begins where the parent does.
    return int(options.child[::-1][options.seconds(n)[0][::-1].argmin()])


def packs(table: Table) -> list[tuple[np.ndarray, Block]]:
    """Rows and ranks of every pack of every round."""
    found = []
    order = np.lexsort((-table.parent_width, table.parent_first, table.round))
    first, end = table.parent_first[order].tolist(), (table.parent_first + table.parent_width)[order].tolist()
    rounds = table.round[order].tolist()
    start = 0
    for at in range(1, len(order) + 1):
        if at == len(order) or rounds[at] != rounds[start] or first[at] >= end[start]:
            found.append((order[start:at], Block(first[start], end[start] - first[start])))
            start = at
    return found


def place_children(
    problem: Problem, local: Shapes, rows: np.ndarray, parent: Block, load: np.ndarray, stretch: float
) -> tuple[np.ndarray, np.ndarray]:
    """Children inside `parent` for its samples, on top of the cheap seconds `load` [world], which is updated.

    Returns:
        First rank and width of each row's child: int64 [rows] each.
    """
    options = local.select((local.parent == parent.width) & (local.child <= parent.width))
    lengths = problem.lengths[rows]
    blocks = inner_blocks(problem.topology, parent)
    options = options.select(np.isin(options.child, list(blocks)))
    if not len(options):
        return np.full(len(rows), parent.first), np.full(len(rows), parent.width)
    cheap = options.cheap_seconds(lengths)
    cheap = np.where(options.fits(lengths), cheap, np.inf)
    unfit = ~np.isfinite(cheap).any(axis=1)
    child_first, child_width = np.full(len(rows), parent.first), np.full(len(rows), parent.width)
    if unfit.all():
        return child_first, child_width
    fit = np.flatnonzero(~unfit)
    area = np.where(np.isfinite(cheap[fit]), cheap[fit] * options.child, np.inf)
    time = least_time(cheap[fit], area, np.ones(len(fit)), parent.width)
    choice = cheapest_within(cheap[fit], area, time * stretch)
    widths = options.child[choice]
    child_first[fit] = list_schedule(widths, cheap[fit, choice], blocks, load, {})
    child_width[fit] = widths
    return child_first, child_width


def _keep(problem: Problem, base: Table, rows: np.ndarray, load: np.ndarray) -> None:
    """Count the cheap seconds of rows whose children stay."""
    for row in rows.tolist():
        shape = problem.shapes.index(int(base.parent_width[row]), int(base.child_width[row]))
        one = problem.shapes.select(np.arange(len(problem.shapes)) == shape)
        first = int(base.child_first[row])
        load[first : first + int(base.child_width[row])] += one.cheap_seconds(problem.lengths[row : row + 1])[0, 0]


def better_packs(problem: Problem, old: Table, new: Table) -> Table:
    """Pack by pack the children that take less time; both tables have the same rounds and parents."""
    child_first, child_width = old.child_first.copy(), old.child_width.copy()
    limit = problem.cap * (1 + 1e-9)
    for number in range(old.rounds):
        before, after = old.in_round(number), new.in_round(number)
        old_load = load_round(before, problem.topology, problem.costs, old.recompute[number])
        new_load = load_round(after, problem.topology, problem.costs, new.recompute[number])
        was, now = pack_seconds(old_load, problem.costs), pack_seconds(new_load, problem.costs)
        for at in np.flatnonzero(now.seconds < was.seconds).tolist():
            ranks = slice(int(now.first[at]), int(now.end[at]))
            if max(new_load.tokens[ranks].max(), new_load.held[ranks].max()) > limit:
                continue
            rows = after.row[(after.parent_first >= now.first[at]) & (after.parent_first < now.end[at])]
            child_first[rows], child_width[rows] = new.child_first[rows], new.child_width[rows]
    return replace(old, child_first=child_first, child_width=child_width)


def repack_parents_table(problem: Problem, base: Table, repacked: Table) -> Table:
    """The best of `repacked` and of the child solver on packs of `base` with other members."""
    best, best_seconds = repacked, problem.judge(repacked)
    for weight in (0.0, 0.5, 1.0):
        dealt = deal(problem, base, weight)
        if dealt is base or not np.isfinite(problem.judge(dealt)):
            continue
        table = solve_children(problem, dealt)
        seconds = problem.judge(table)
        if seconds < best_seconds:
            best, best_seconds = table, seconds
    if worth_searching(problem) and (best.parent_width > 1).any():
        best, _ = refine(problem, best, same_slots, spare=0)
    return best


def deal(problem: Problem, base: Table, weight: float) -> Table:
    """Samples of each parent width dealt over that width's packs, largest share of the load first.

    `weight` mixes what is balanced: 0 = full attention, 1 = everything else. `base` itself where no pack has two
    samples to give.
    """
    rounds, first = base.round.copy(), base.parent_first.copy()
    changed = False
    for width in np.unique(base.parent_width).tolist():
        rows = np.flatnonzero(base.parent_width == width)
        slots = np.unique(np.stack([base.round[rows], base.parent_first[rows]], axis=1), axis=0)
        if width == 1 or len(slots) < 2 or len(rows) == len(slots):
            continue
        changed = True
        shape = problem.shapes.index(width, width)
        one = problem.shapes.select(np.arange(len(problem.shapes)) == shape)
        lengths = problem.lengths[rows]
        full, cheap = one.full_seconds(lengths)[:, 0], one.cheap_seconds(lengths)[:, 0]
        # A part may weigh nothing: full attention without F layers, the rest where children outnumber tokens.
        amount = np.stack([part / (part.sum() or 1.0) for part in (full, cheap, lengths)])
        load = np.zeros((3, len(slots)))
        mix = np.array([1 - weight, weight, 0.0])
        room = np.full(len(slots), problem.cap * width / lengths.sum())
        for item in np.argsort(-(mix @ amount), kind="stable").tolist():
            score = mix @ (load + amount[:, item, None])
            score = np.where(load[2] + amount[2, item] <= room, score, score + 1e3)
            slot = int(score.argmin())
            load[:, slot] += amount[:, item]
            rounds[rows[item]], first[rows[item]] = slots[slot]
    if not changed:
        return base
    return replace(base, round=rounds, parent_first=first, child_first=first, child_width=base.parent_width)
