"""The published comparison in its own terms: given packs, with repacking off, children repacked, members exchanged.

Paper-style packs of one step (16,384 tokens a rank, prolong): rule A, all packs as wide as the longest sample needs;
rule B, one wide pack, the rest SP8. A sample needs one rank for every 8,192 tokens.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console

from benchmarks.planner_cases import grid_table, problem_of, real_lengths
from raypack.plan.table import Table
from raypack.planning.evaluate import evaluate_table
from raypack.planning.greedy import capacity
from raypack.planning.policies import best_table
from raypack.planning.problem import Problem
from raypack.planning.repack import repack_parents_table, repack_table

RANKS, RANK_TOKENS, NEED = 64, 16_384, 8_192
AIMS = {"A": "repack -9 %, +parents -17 %, joint -28 %", "B": "+parents -2.5 %, joint -8 %"}


def steps(count: int) -> list[np.ndarray]:
    """Seeded steps whose longest sample is 65,536 to 262,144 tokens, so that it needs 16 or 32 ranks."""
    found, seed = [], 0
    lengths = real_lengths("prolong", clip=262_144)
    while len(found) < count:
        drawn = np.random.default_rng(1000 + seed).choice(lengths, RANKS * RANK_TOKENS // 50)
        step = drawn[: int(np.searchsorted(np.cumsum(drawn), RANKS * RANK_TOKENS))]
        seed += 1
        if 65_536 <= step.max() <= 262_144:
            found.append(step)
    return found


def given_packs(problem: Problem, rule: str) -> Table:
    """Every sample at the pack that ends first among those that hold it; as many rounds as the cap asks for."""
    lengths = problem.lengths
    wide = 16 if lengths[0] <= 16 * NEED else 32
    blocks = [(first, wide) for first in range(0, RANKS if rule == "A" else wide, wide)]
    blocks += [(first, 8) for first in range(wide, RANKS, 8)] if rule == "B" else []
    equal = problem.equal_shapes
    column = {int(w): i for i, w in enumerate(equal.parent)}
    seconds = equal.seconds(lengths)
    slots = [(0, first, width, 0.0, capacity(problem, width)) for first, width in blocks]
    chosen = np.empty((3, len(lengths)), dtype=np.int64)
    for item, length in enumerate(lengths.tolist()):
        holding = [s for s in slots if s[4] >= length and (rule == "A" or length <= NEED * s[2])]
        if not holding:
            number = 1 + max(s[0] for s in slots)
            slots += [(number, first, width, 0.0, capacity(problem, width)) for first, width in blocks]
            holding = [s for s in slots if s[4] >= length and (rule == "A" or length <= NEED * s[2])]
        best = min(holding, key=lambda s: (s[3] + seconds[item, column[s[2]]], s[0], s[1]))
        slots.remove(best)
        number, first, width, load, room = best
        slots.append((number, first, width, load + seconds[item, column[width]], room - length))
        chosen[:, item] = number, first, width
    return problem.table(chosen[0], chosen[1], chosen[2], chosen[1], chosen[2])


def report(console: Console, draws: int) -> None:
    table = grid_table(
        f"Given packs, prolong, {RANKS} ranks, {RANK_TOKENS} tokens a rank: step seconds against repacking off",
        "rule",
        "repack",
        "repack+parents",
        "dynamic (free)",
        "joint (free)",
        "MFU, repack+parents",
        "aim",
    )
    for rule, aim in AIMS.items():
        rows = []
        for step in steps(draws):
            problem = problem_of(step, RANKS)
            off = given_packs(problem, rule)
            repacked = repack_table(problem, off)
            parents = repack_parents_table(problem, off, repacked)
            plans = (repacked, parents, best_table(problem, "dynamic"), best_table(problem, "joint"))
            before = problem.judge(off)
            rows.append([problem.judge(plan) / before - 1 for plan in plans])
            evaluate_table(off, problem.topology, problem.costs, problem.sync, "given")
        mean = np.mean(rows, axis=0)
        gain = float(np.mean([1 / (1 + row[1]) - 1 for row in rows]))
        table.add_row(rule, *(f"{100 * x:+.1f} %" for x in mean), f"{100 * gain:+.1f} % relative", aim)
    console.print(table)
