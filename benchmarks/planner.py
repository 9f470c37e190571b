"""The planner against its targets: distance to the bound, scaling, given packs, static, solve time, the exact optimum.

Model `1f3s-30b-a3b`; 400 TFLOP/s attainable, ratio 7.0, sync = step unless said otherwise; seeded draws from real
length lists clipped at 131,072.
"""

from __future__ import annotations

import sys

import numpy as np
from rich.console import Console

from benchmarks import planner_packs, planner_scale
from benchmarks.planner_cases import SETS, available_sets, grid_table, length_folder, problem_of, real_lengths, run
from raypack.layers.costs import Costs
from raypack.planning.policies import best_table
from raypack.planning.problem import Problem

AIMS = {
    "wikipedia": (1.018, 1.005, 1.01),
    "wlb128k": (1.007, 1.003, 1.004),
    "prolong": (1.015, 1.004, 1.006),
}
CASES = ((32, 256), (32, 1024), (64, 1024))


def to_the_bound(console: Console, draws: int) -> None:
    table = grid_table(
        f"Seconds / area bound, mean of {draws} draws (worst)",
        "set, ranks, samples",
        "dynamic",
        "joint",
        "joint / prototype's bound",
        "aim",
        "layer: dynamic",
        "layer: joint",
        "lockstep: dynamic",
        "lockstep: joint",
    )
    for name in available_sets():
        for (ranks, samples), aim in zip(CASES, AIMS[name], strict=True):
            rows = []
            for seed in range(draws):
                lengths = np.random.default_rng(seed).choice(real_lengths(name), samples)
                step = problem_of(lengths, ranks)
                layer = problem_of(lengths, ranks, sync="layer")
                lock = problem_of(lengths, ranks, sync="layer", prefetch_layers=0)
                dynamic, joint = run(step, "dynamic"), run(step, "joint")
                others = [run(problem, policy).ratio for problem in (layer, lock) for policy in ("dynamic", "joint")]
                rows.append((dynamic.ratio, joint.ratio, joint.loose_ratio, *others))
            cells = [f"{m:.4f} ({w:.4f})" for m, w in zip(np.mean(rows, 0), np.max(rows, 0), strict=True)]
            table.add_row(f"{name}, {ranks}, {samples}", *cells[:3], f"{aim}", *cells[3:])
    console.print(table)


def against_the_optimum(console: Console, cases: int, seconds: float) -> None:
    """CP-SAT starts from the planner's plan; two rounds at most, as more rarely help and never let it finish."""
    from tests.planning_oracle import solve  # OR-Tools is a development dependency

    table = grid_table(
        f"Planner over CP-SAT ({seconds:.0f} s), exact seconds: equal where proven, within 1.5 % else",
        "samples, ranks",
        "proven",
        "worst where proven",
        "worst elsewhere",
    )
    for samples, ranks in ((4, 8), (6, 8), (10, 16)):
        proven, elsewhere = [], []
        for seed in range(cases):
            lengths = np.random.default_rng(seed).choice(real_lengths("prolong"), samples)
            whole = problem_of(lengths, ranks)
            costs = Costs(whole.costs.model, whole.costs.cluster)
            topology = type(whole.topology).regular(ranks, 4)
            problem = Problem(whole.samples, topology, costs, "step", 0, "none", whole.budget)
            table_ = best_table(problem, "joint")
            optimum = solve(problem, max(2, table_.rounds), seconds, table_)
            ratio = problem.judge(table_) / problem.judge(optimum.table)
            (proven if optimum.proven else elsewhere).append(ratio)
        worst = [f"{max(part):.4f}" if part else "-" for part in (proven, elsewhere)]
        table.add_row(f"{samples}, {ranks}", f"{len(proven)} of {cases}", *worst)
    console.print(table)


def main(quick: bool, only_oracle: bool = False) -> None:
    console = Console(width=200)
    missing = sorted(set(SETS) - set(available_sets()))
    if missing:
        console.print(
            f"skipped: no {missing[0]}.npz in {length_folder().name}/ (set RAYPACK_LENGTHS to a folder of lists)"
        )
        return
    draws = 2 if quick else 8
    if only_oracle:
        against_the_optimum(console, draws, 5.0 if quick else 20.0)
        return
    to_the_bound(console, draws)
    planner_scale.strong_scaling(console, draws if quick else 4)
    planner_scale.window(console, 1 if quick else 3)
    planner_scale.long_tail(console, draws)
    planner_packs.report(console, draws)
    planner_scale.against_static(console, draws if quick else 4)
    planner_scale.solve_time(console, quick)
    against_the_optimum(console, draws, 5.0 if quick else 20.0)


if __name__ == "__main__":
    if sys.argv[1:] != ["oracle"]:
        sys.exit("error: the one part that runs alone is 'oracle'; python -m benchmarks --only planner runs all")
    main(quick=False, only_oracle=True)
