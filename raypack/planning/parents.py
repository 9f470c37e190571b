"""Policy `repack+parents`: change who shares a pack, so that the children can balance; widths of parents stay.

Samples of one parent width change packs, across rounds too: dealt anew by list scheduling on the cheap part (what the
children must balance) or on the full part, then the child solver runs again. Packs are as many and as wide as before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raypack.plan.table import Table
from raypack.planning.children import solve_children
from raypack.planning.problem import Problem
from raypack.planning.refine import refine, worth_searching
from raypack.planning.rules import same_slots


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
