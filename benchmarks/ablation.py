"""What each part of policy `joint` earns: it is taken out, and the step planned again.

Seconds without a part over seconds with all parts, and the planner's CPU seconds. A part is taken out by putting
something in its place in the planner's modules for one run; a stage of the policy whose code and input stay as they
were isn't run again. Real lists, long tails, equal lengths, few samples, and the default job's own steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.ablation_parts import PARTS, STAGES
from benchmarks.planner_cases import SETS, available_sets, grid_table, length_folder, problem_of, real_lengths, step_of
from raypack.config import load_cluster
from raypack.config.runfile import load_run
from raypack.data.corpus import Corpus
from raypack.data.default import default_corpus
from raypack.data.splits import training_stream
from raypack.layers.costs import Costs
from raypack.plan.table import Table
from raypack.plan.topology import Topology
from raypack.planning.policies import best_table
from raypack.planning.problem import Problem
from raypack.planning.steps import ITEM_BYTES

JOB = "1f3s_local"
LONG = 131_072
SYNCS: dict[str, dict[str, Any]] = {
    "step": {"sync": "step"},
    "layer": {"sync": "layer", "prefetch_layers": 1},
    "lockstep": {"sync": "layer", "prefetch_layers": 0},
    "node": {"sync": "node"},
}


@dataclass
class Known:
    """Stages run so far on one problem with all parts: what they gave, and their CPU seconds, by name and input."""

    problem: Problem
    stages: dict[tuple[str, ...], tuple[Table, float]] = field(default_factory=dict)

    def plan(self, swaps: dict[str, Any], changed: tuple[str, ...]) -> tuple[float, float]:
        """Seconds of the step and CPU seconds of its planner with `swaps`, which change the code of some stages."""
        spent: list[float] = []
        with ExitStack() as stack:
            for name, value in swaps.items():
                stack.enter_context(patch(f"raypack.planning.{name}", value))
            for stage in STAGES:
                target = f"raypack.planning.policies.{stage}"
                stack.enter_context(patch(target, self._stage(stage, resolve_name(target), stage in changed, spent)))
            table = best_table(self.problem, "joint")
        return self.problem.judge(table), sum(spent)

    def _stage(self, name: str, run: Callable[..., Table], changed: bool, spent: list[float]) -> Callable[..., Table]:
        def stage(problem: Problem, *bases: Any) -> Table:
            tables = bases[0] if bases and isinstance(bases[0], list) else bases
            key = (name, *(table.digest.hex() for table in tables))
            found = None if changed else self.stages.get(key)
            if found is None:
                problem.__dict__.pop("_judged", None)  # each run judges its own plans
                started = time.process_time()
                table = run(problem, *bases)
                found = table, time.process_time() - started
            if not changed:
                self.stages[key] = found
            spent.append(found[1])
            return found[0]

        return stage


def called(problem: Problem) -> set[str]:
    """Functions that any part watches and that the whole policy calls; also warms what the problem keeps."""
    seen = set[str]()

    def watch(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            seen.add(name)
            return run(*arguments, **options)

        return watched

    with ExitStack() as stack:
        for name in {name for part in PARTS for name in part.watched}:
            target = f"raypack.planning.{name}"
            stack.enter_context(patch(target, watch(name, resolve_name(target))))
        best_table(problem, "joint")
    return seen


@dataclass(frozen=True)
class Figures:
    """Of one part and step: seconds without it over seconds with it, CPU seconds without and with it."""

    ratio: float
    cpu_without: float
    cpu_with: float


def take_apart(problem: Problem) -> dict[str, Figures]:
    """Figures of every part on one step, by part."""
    seen, known = called(problem), Known(problem)
    seconds, cpu = known.plan({}, ())
    figures = {}
    for part in PARTS:
        without = known.plan(part.swaps, part.stages) if seen & set(part.watched) else (seconds, cpu)
        figures[part.name] = Figures(without[0] / seconds, without[1], cpu)
    return figures


Cases = Iterator[tuple[str, Problem]]
"""(sync, problem) of every step and sync of a group."""


def of_lengths(steps: list[tuple[np.ndarray, int]], syncs: tuple[str, ...], node: int = 8) -> Cases:
    """`node` = ranks of one."""
    for lengths, ranks in steps:
        for sync in syncs:
            problem = problem_of(lengths, ranks, **SYNCS[sync])
            yield sync, replace(problem, topology=Topology.regular(ranks, node))


def of_default_job(steps: int, syncs: tuple[str, ...]) -> Cases:
    """Steps of the default run file from several orders of its corpus, as its planner gets them."""
    config = load_run([], JOB)
    corpus, topology = Corpus.open(default_corpus(progress=False)), Topology(tuple(config.topology.nodes))
    longest, recompute, budget = config.data.max_sample_tokens, config.train.recompute, config.plan.budget
    for seed in range(steps):
        stream = training_stream(corpus, config.data.model_copy(update={"seed": seed}))
        samples = stream.step(stream.start).samples.canonical()
        for sync in syncs:
            cluster = load_cluster(config.plan.cluster, SYNCS[sync])
            costs = Costs(config.model, cluster, ITEM_BYTES[config.train.dtype])
            yield sync, Problem(samples, topology, costs, cluster.sync, longest, recompute, budget)


def groups(quick: bool) -> dict[str, Cases]:
    """Cases by the name of their group; without real lists only those that need none."""
    lists = available_sets()
    syncs = ("step", "lockstep") if quick else tuple(SYNCS)
    draws = [np.random.default_rng(0).choice(real_lengths(name), 1024) for name in lists]
    near = np.maximum(1, np.random.default_rng(0).normal(8192, 0.03 * 8192, 72)).astype(np.int64)
    equal = [(np.full(9, 8192), 8), (np.full(67, 4096), 64), (near, 64)]
    found = {
        "default job, 4 ranks": of_default_job(1 if quick else 8, syncs),
        "equal lengths, 8 and 64 ranks": of_lengths(equal[: 1 if quick else None], syncs),
    }
    if lists:
        sizes = ((3, 8), (6, 8), (10, 8), (5, 16), (12, 16))
        few = [(draws[at % len(draws)][16 * at :][:count], ranks) for at, (count, ranks) in enumerate(sizes)]
        found["3 to 12 samples, 8 and 16 ranks"] = of_lengths(few[: 1 if quick else None], syncs, node=4)
    if lists and not quick:
        tails = [step_of(name, 64 * tokens, 0, LONG) for name, tokens in zip(lists, (4096, 16_384, 4096), strict=False)]
        found["32 ranks, 256 samples"] = of_lengths([(draw[:256], 32) for draw in draws], syncs)
        found[f"64 ranks, one sample of {LONG:,}"] = of_lengths([(tail, 64) for tail in tails], syncs)
        found["64 ranks, 1,024 samples"] = of_lengths([(draw, 64) for draw in draws], syncs)
    return found


def shown(figures: list[Figures]) -> tuple[str, str]:
    """Seconds: median (least to most) of what the steps take longer without the part, in %; mean CPU seconds."""
    more = [100 * (figure.ratio - 1) for figure in figures]
    with_, without = (np.mean([getattr(f, name) for f in figures]) for name in ("cpu_with", "cpu_without"))
    changed = f"{np.median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})" if np.ptp([0.0, *more]) > 5e-5 else "-"
    return changed, f"{without:.2f} / {with_:.2f}" if with_ != without else "-"


def report(name: str, found: dict[str, list[dict[str, Figures]]]) -> RichTable:
    """One group: a row for each part, two columns for each sync."""
    steps = len(next(iter(found.values())))
    title = f"{name}, {steps} steps: % longer without a part, median (least to most); CPU seconds without / with it"
    table = grid_table(title, "without", *(column for sync in found for column in (f"{sync}: %", "CPU s")))
    for part in PARTS:
        cells = [shown([figures[part.name] for figures in each]) for each in found.values()]
        table.add_row(part.name, *(cell for pair in cells for cell in pair))
    return table


def main(quick: bool) -> None:
    console = Console(width=200)
    if missing := sorted(set(SETS) - set(available_sets())):
        folder = length_folder().name
        console.print(f"skipped: steps of {', '.join(missing)}: not in {folder}/ (RAYPACK_LENGTHS: a folder of lists)")
    for name, cases in groups(quick).items():
        found: dict[str, list[dict[str, Figures]]] = {}
        for sync, problem in cases:
            found.setdefault(sync, []).append(take_apart(problem))
        console.print(report(name, found))
