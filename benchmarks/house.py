"""The house in figures: imports, files and functions, and what one training step and one small plan run through."""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any

import grimp
import torch.distributed as dist
from rich.console import Console

import raypack
from benchmarks.planner_cases import grid_table
from raypack.config import TrainSection, load_cluster, load_model
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.samples import Samples
from raypack.plan.topology import Block, Topology
from raypack.planning.policies import make_plan
from raypack.training.step import train_step
from raypack.training.work import prepare

ROOT = Path(raypack.__file__).parent


def main(quick: bool) -> None:
    table = grid_table("The house", "what", "figure")
    for what, figure in (*imports(), *functions(), *step(), *small_plan()):
        table.add_row(what, figure)
    Console(width=120).print(table)


def imports() -> Iterator[tuple[str, str]]:
    graph = grimp.build_graph("raypack", exclude_type_checking_imports=True)
    below = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    @cache
    def level(module: str) -> int:
        return 1 + max((level(other) for other in below[module]), default=0)

    files = [module for module in graph.modules if not (ROOT.parent / module.replace(".", "/")).is_dir()]
    importers = Counter(other for others in below.values() for other in others)
    yield "files, without those of packages themselves", str(len(files))
    yield "import levels", str(max(map(level, graph.modules)))  # a circle would never end
    yield "files with a single importer", str(sum(importers[module] == 1 for module in files))
    folders = Counter(module.rpartition(".")[0] for module in files)
    yield "largest folders", ", ".join(f"{name} {count}" for name, count in folders.most_common(4))


def functions() -> Iterator[tuple[str, str]]:
    lengths = [
        node.end_lineno - node.lineno + 1
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    yield "functions; mean and largest, lines", f"{len(lengths)}; {mean(lengths):.1f}, {max(lengths)}"


def step() -> Iterator[tuple[str, str]]:
    """One step of two layers, F and S with experts, on 4 ranks as threads, by heads; the trainer is there before."""
    from tests import threads  # as tests run ranks
    from tests.ranks import Case, loader, make_trainer, tiny_model

    model, placed = tiny_model(), []
    for sample, (length, parent, child) in enumerate(((30, (0, 4), (0, 2)), (11, (0, 4), (3, 1)), (9, (1, 1), (1, 1)))):
        placed.append(Placement(sample, length, Block(*parent), Block(*child), length - 1))
    plan, case = Plan((2, 2), (Round(tuple(placed)),)), Case(model, TrainSection(dtype="float64"))
    seen: dict[str, set[str]] = defaultdict(set)

    def on_rank(rank: int, _world: int) -> None:
        trainer = make_trainer(case, plan.topology, poison=False)
        with watched(seen):
            train_step(trainer, prepare(plan, plan.topology, dist.get_rank(), model, loader(case)))

    threads.run(4, on_rank)
    yield "one step, without planning", described(seen)


def small_plan() -> Iterator[tuple[str, str]]:
    """Three samples by `joint`, after one that has filled the caches."""
    cluster, model, seen = load_cluster("local-2x2"), load_model("1f3s-30b-a3b"), defaultdict[str, set[str]](set)
    for _ in range(2):
        seen.clear()
        with watched(seen):
            make_plan(Samples.of_lengths([3000, 900, 200]), Topology((2, 2)), cluster, model, "joint", budget=200)
    yield "a plan of three samples", described(seen)


@contextmanager
def watched(seen: dict[str, set[str]]) -> Iterator[None]:
    """Notes the functions of the package that this thread enters, by file."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            seen[code.co_filename].add(code.co_qualname)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def described(seen: dict[str, set[str]]) -> str:
    lines = sum(len(Path(path).read_text(encoding="utf-8").splitlines()) for path in seen)
    return f"{len(seen)} files, {lines:,} lines, {sum(map(len, seen.values()))} functions"
