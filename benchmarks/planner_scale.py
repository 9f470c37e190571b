"""Strong scaling, the window in which `joint` pays, static baselines, and how planning time grows."""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import numpy as np
from rich.console import Console

from benchmarks.planner_cases import (
    CLIP,
    available_sets,
    grid_table,
    problem_of,
    real_lengths,
    run,
    step_of,
    target_cluster,
    target_model,
)
from raypack.plan.grid import cover
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.policies import make_plan
from raypack.planning.uniform import tile_table
from raypack.simulate.presets import length_preset

RANKS = 64
SWEEP_TOKENS = 8192
SIZES = ((1024, 64), (16_384, 1024), (131_072, 8192))
TIME_AIMS = {"dynamic": (0.03, 0.4, 4.0), "joint": (0.2, 2.0, 20.0)}


def strong_scaling(console: Console, draws: int) -> None:
    table = grid_table(
        f"Strong scaling, {RANKS} ranks, one sample of {CLIP}: seconds / area bound, mean (worst)",
        "tokens a rank",
        "set",
        "dynamic",
        "joint",
        "joint / prototype's bound",
        "joint, layer",
        "aim (joint)",
    )
    for tokens, aim in ((4096, 1.04), (8192, 1.04), (16_384, 1.035), (24_576, 1.035)):
        for name in available_sets():
            rows = []
            for seed in range(draws):
                lengths = step_of(name, tokens * RANKS, seed, CLIP)
                step, layer = problem_of(lengths, RANKS), problem_of(lengths, RANKS, sync="layer")
                dynamic, joint = run(step, "dynamic"), run(step, "joint")
                assert joint.seconds <= dynamic.seconds * (1 + 1e-9)
                rows.append((dynamic.ratio, joint.ratio, joint.loose_ratio, run(layer, "joint").ratio))
            cells = [f"{m:.4f} ({w:.4f})" for m, w in zip(np.mean(rows, 0), np.max(rows, 0), strict=True)]
            table.add_row(str(tokens), name, *cells, f"{aim}")
    console.print(table)


def window(console: Console, draws: int) -> None:
    """Where a node-local child still keeps up, but a node-wide parent does not: joint against dynamic."""
    ratios, shares = (3, 5, 7, 10), (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
    for sync in ("step", "layer"):
        table = grid_table(
            f"Window: joint against dynamic, prolong, {SWEEP_TOKENS} tokens a rank + one sample of n, sync = {sync}",
            "n / (8 x tokens a rank)",
            *(f"ratio {r}" for r in ratios),
        )
        for share in shares:
            cells = []
            for ratio in ratios:
                saved = []
                for seed in range(draws):
                    lengths = step_of("prolong", SWEEP_TOKENS * RANKS, seed, int(share * 8 * SWEEP_TOKENS))
                    problem = problem_of(lengths, RANKS, 0, sync=sync, inter_rate=280e9 / ratio)
                    saved.append(run(problem, "joint").seconds / run(problem, "dynamic").seconds - 1)
                cells.append(f"{100 * float(np.mean(saved)):+.2f} %")
            table.add_row(f"{share}", *cells)
        console.print(table)


def long_tail(console: Console, draws: int) -> None:
    table = grid_table(
        f"GitHub-like stream (assumed), {RANKS} ranks, step: joint against dynamic (aim: -1 %)",
        "tokens a rank",
        "clip",
        "dynamic / bound",
        "joint / bound",
        "joint - dynamic",
    )
    stream = length_preset("github-like")
    for tokens in (16_384, 32_768):
        for clip in (262_144, 524_288):
            rows = []
            for seed in range(draws):
                drawn = np.minimum(stream.draw(tokens * RANKS // 50, seed), clip)
                lengths = drawn[: max(1, int(np.searchsorted(np.cumsum(drawn), tokens * RANKS)))]
                problem = problem_of(lengths, RANKS)
                dynamic, joint = run(problem, "dynamic"), run(problem, "joint")
                rows.append((dynamic.ratio, joint.ratio, joint.seconds / dynamic.seconds - 1))
            mean = np.mean(rows, axis=0)
            table.add_row(str(tokens), str(clip), f"{mean[0]:.4f}", f"{mean[1]:.4f}", f"{100 * mean[2]:+.2f} %")
    console.print(table)


def against_static(console: Console, draws: int) -> None:
    table = grid_table(
        f"Joint against static, {RANKS} ranks, one sample of {CLIP}: times quicker, mean (least)",
        "tokens a rank",
        "set",
        "static, least width that holds it",
        "best static width",
        "aim",
    )
    for tokens in (4096, 16_384, 32_768):
        for name in available_sets():
            rows = []
            for seed in range(draws):
                problem = problem_of(step_of(name, tokens * RANKS, seed, CLIP), RANKS)
                joint = run(problem, "joint").seconds
                equal = problem.equal_shapes
                holding = equal.parent[equal.fits(problem.lengths[:1])[0]].tolist()
                statics = [problem.judge(tile_table(problem, cover(problem.topology, int(w)))) for w in holding]
                rows.append((statics[0] / joint, min(statics) / joint))
            cells = [f"{m:.2f} ({w:.2f})" for m, w in zip(np.mean(rows, 0), np.min(rows, 0), strict=True)]
            table.add_row(str(tokens), name, *cells, ">= 2, >= 1" if tokens <= 16_384 else ">= 1.15, >= 1")
    console.print(table)


def solve_time(console: Console, quick: bool) -> None:
    """Each size in a process of its own, so that peak memory is its own too."""
    table = grid_table(
        "Solve time, one core (CPU seconds, default budget), wikipedia",
        "samples, ranks",
        "dynamic",
        "joint",
        "joint / bound",
        "peak memory",
        "aims",
    )
    seconds = []
    for at, (samples, ranks) in enumerate(SIZES[:2] if quick else SIZES):
        command = [sys.executable, "-m", "benchmarks.planner_scale", str(samples), str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        dynamic, joint, ratio, memory = map(float, done.stdout.split())
        seconds.append(dynamic)
        aims = f"{TIME_AIMS['dynamic'][at]} s, {TIME_AIMS['joint'][at]} s, 1 GiB"
        cells = (f"{dynamic:.2f} s", f"{joint:.2f} s", f"{ratio:.4f}", f"{memory / 2**30:.2f} GiB", aims)
        table.add_row(f"{samples}, {ranks}", *cells)
    growth = np.polyfit(np.log([size[0] for size in SIZES[: len(seconds)]]), np.log(seconds), 1)[0]
    table.caption = f"growth exponent of dynamic in samples: {growth:.2f} (aim: at most 1.3)"
    console.print(table)


def _time_one(samples: int, ranks: int) -> None:
    lengths = np.random.default_rng(0).choice(real_lengths("wikipedia"), samples)
    topology, cluster, model = Topology.regular(ranks, 8), target_cluster(), target_model()
    make_plan(Samples.of_lengths(lengths[:64]), Topology.regular(8, 8), cluster, model, "joint", budget=0)
    found = []
    for policy in ("dynamic", "joint"):
        started = time.process_time()
        plan = make_plan(Samples.of_lengths(lengths), topology, cluster, model, policy)
        found.append(time.process_time() - started)
    problem = problem_of(lengths, ranks)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ratio = run(problem, "dynamic").ratio
    assert sum(len(r.placements) for r in plan.rounds) == samples
    print(*found, ratio, memory)


if __name__ == "__main__":
    _time_one(int(sys.argv[1]), int(sys.argv[2]))
