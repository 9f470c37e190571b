"""Plans for lockstep (sync = layer without prefetch, sync = node): full and cheap seconds balance separately.

Every layer waits for its slowest rank, so a round takes its largest full part plus its largest cheap part over all
ranks. Long samples get a parent wide enough that their full attention is about a rank's even share, and a child that
holds them without more than an even share of the cheap part: a 20K-token document may be attended to by eight ranks and
held by two. Short samples then go where neither maximum grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.plan.grid import inner_blocks
from raypack.plan.table import Table
from raypack.planning.problem import Problem
from raypack.planning.shapes import Shapes
from raypack.planning.uniform import in_rounds, round_counts

FULL_SHARES = (2.0, 4.0, 8.0)
"""A sample's full part may be this many times the even share of a rank and round."""

MOST_STEPS = 100_000_000
"""Samples x ranks x rounds above which only one table is made."""

CHEAP_SHARE = 0.9
"""A sample's cheap part may be this share of the even one."""


@dataclass(eq=False)
class _Levels:
    """Seconds and heads of every (round, rank) so far: arrays [rounds x world]; `even_*` = the shares aimed at."""

    full: np.ndarray
    cheap: np.ndarray
    even_full: float
    even_cheap: float

    @classmethod
    def of(cls, slots: int, full: float, cheap: float) -> _Levels:
        """Nothing so far, of these totals; a share is never zero (models without F layers): loads are divided by it."""
        least = float(np.finfo(np.float64).tiny)
        return cls(np.zeros(slots), np.zeros(slots), max(full / slots, least), max(cheap / slots, least))


def balanced_tables(problem: Problem) -> list[Table]:
    """Plans for several numbers of rounds and widths of parents."""
    counts: range = round_counts(problem)
    shares: tuple[float, ...] = FULL_SHARES
    if len(problem.lengths) * problem.topology.world > MOST_STEPS:
        counts, shares = counts[:1], shares[1:2]
    return [balanced_table(problem, rounds, share) for rounds in counts for share in shares]


def balanced_table(problem: Problem, rounds: int, share: float) -> Table:
    """Parents by full part, children by cheap part, widest parents first, then one-rank samples."""
    world, shapes = problem.topology.world, problem.shapes
    unique, index = np.unique(problem.lengths, return_inverse=True)
    single = shapes.parent == 1
    full_one = shapes.select(single).full_seconds(unique)[:, 0][index]
    cheap_one = shapes.select(single).cheap_seconds(unique)[:, 0][index]
    levels = _Levels.of(world * rounds, float(full_one.sum()), float(cheap_one.sum()))
    choice = _shapes(shapes, unique, share * levels.even_full, CHEAP_SHARE * levels.even_cheap)[index]
    full = shapes.full_seconds(unique)[index, choice]
    cheap = shapes.cheap_seconds(unique)[index, choice]
    parent, child = shapes.parent[choice], shapes.child[choice]
    parent_first = np.empty(len(choice), dtype=np.int64)
    child_first = np.empty(len(choice), dtype=np.int64)
    order = np.lexsort((np.arange(len(choice)), -(full + cheap), -child, -parent))
    for row in order[parent[order] > 1].tolist():
        place = _place_wide(problem, levels, int(parent[row]), int(child[row]), full[row], cheap[row], rounds)
        parent_first[row], child_first[row] = place
    for row in order[parent[order] == 1].tolist():
        parent_first[row] = child_first[row] = _place_one(levels, full[row], cheap[row])
    return problem.table(parent_first // world, parent_first % world, parent, child_first % world, child)


def _shapes(shapes: Shapes, lengths: np.ndarray, full_limit: float, cheap_limit: float) -> np.ndarray:
    """Narrowest parent, then narrowest child, within both limits; where none is, what exceeds them least."""
    fits = shapes.fits(lengths)
    full, cheap = shapes.full_seconds(lengths), shapes.cheap_seconds(lengths)
    excess = np.maximum(full - full_limit, 0) + np.maximum(cheap - cheap_limit, 0)
    rank = np.arange(len(shapes))[None, :]
    within = fits & (excess <= 0)
    best = np.where(within, rank, len(shapes)).min(axis=1)
    none = best == len(shapes)
    best[none] = np.where(fits, excess, np.inf)[none].argmin(axis=1)
    return best


def _place_wide(
    problem: Problem, levels: _Levels, parent: int, child: int, full: float, cheap: float, rounds: int
) -> tuple[int, int]:
    """First ranks (over all rounds) of the parent with least full and of the child inside it with least cheap load."""
    world = problem.topology.world
    blocks = in_rounds(problem, parent, rounds)
    first = np.array([b.first for b in blocks])
    at = first[:, None] + np.arange(parent)
    score = levels.full[at].max(axis=1) / levels.even_full + levels.cheap[at].mean(axis=1) / levels.even_cheap
    block = blocks[int(score.argmin())]
    shift = block.first // world * world
    inside = inner_blocks(problem.topology, block._replace(first=block.first - shift)).get(child)
    starts = [shift + b.first for b in inside] if inside else [block.first]
    start = min(starts, key=lambda a: (levels.cheap[a : a + child].max(), a))
    levels.full[block.first : block.end] += full
    levels.cheap[start : start + child] += cheap
    return block.first, start


def _place_one(levels: _Levels, full: float, cheap: float) -> int:
    """The rank where the largest full plus the largest cheap part grow least; then the one farthest below its share."""
    top_full, top_cheap = max(levels.full.max(), levels.even_full), max(levels.cheap.max(), levels.even_cheap)
    grown = np.maximum(levels.full + full, top_full) + np.maximum(levels.cheap + cheap, top_cheap)
    room = np.maximum((levels.full + full) / levels.even_full, (levels.cheap + cheap) / levels.even_cheap)
    at = int((grown + 1e-6 * (top_full + top_cheap) * room).argmin())
    levels.full[at] += full
    levels.cheap[at] += cheap
    return at
