"""What the planner's benchmarks share: the cluster of the targets, real length lists, seeded steps, judging."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from rich.table import Table as RichTable

from raypack.config import ClusterConfig, ModelConfig, load_cluster, load_model
from raypack.layers.costs import Costs
from raypack.plan.samples import Samples
from raypack.plan.table import Table
from raypack.plan.topology import Topology
from raypack.planning.bounds import least_time
from raypack.planning.policies import DEFAULT_BUDGET, best_table
from raypack.planning.problem import Problem

SETS = ("wikipedia", "wlb128k", "prolong")
CLIP = 131_072
ATTAINABLE = 400e12
"""FLOP/s of one rank in the targets' tables."""


def length_folder() -> Path:
    """Real length lists: `RAYPACK_LENGTHS`, or `shared/lengths` beside the checkout."""
    return Path(os.environ.get("RAYPACK_LENGTHS") or Path(__file__).parents[2] / "shared" / "lengths")


def available_sets() -> tuple[str, ...]:
    return tuple(name for name in SETS if (length_folder() / f"{name}.npz").is_file())


@lru_cache(maxsize=8)
def real_lengths(name: str, clip: int = CLIP) -> np.ndarray:
    with np.load(length_folder() / f"{name}.npz", allow_pickle=False) as file:
        return np.minimum(file["lengths"].astype(np.int64), clip)


def target_model() -> ModelConfig:
    return load_model("1f3s-30b-a3b")


def target_cluster(**changes: object) -> ClusterConfig:
    """The pinned cluster with 400 TFLOP/s attainable; ratio 7.0, no round cost."""
    share = ATTAINABLE / 989e12
    return load_cluster("h100-8x8", {"matmul_share": share, "attention_share": share, **changes})


def step_of(name: str, tokens: int, seed: int, *extra: int) -> np.ndarray:
    """A seeded step from a real list: documents until the next would exceed `tokens`, then `extra` ones."""
    drawn = np.random.default_rng(seed).choice(real_lengths(name), tokens // 50)
    count = int(np.searchsorted(np.cumsum(drawn), tokens, side="right"))
    return np.concatenate([drawn[:count], np.array(extra, dtype=np.int64)])


def problem_of(lengths: np.ndarray, ranks: int, budget: int = DEFAULT_BUDGET, **changes: object) -> Problem:
    cluster = target_cluster(**changes)
    costs = Costs(target_model(), cluster)
    samples = Samples.of_lengths(lengths).canonical()
    return Problem(samples, Topology.regular(ranks, 8), costs, cluster.sync, 0, "none", budget)


@dataclass(frozen=True)
class Result:
    """A policy on one step: seconds, seconds over the area bound and over the prototype's, plan seconds."""

    seconds: float
    ratio: float
    loose_ratio: float
    plan_seconds: float
    table: Table


def run(problem: Problem, policy: str) -> Result:
    started = time.process_time()
    table = best_table(problem, policy)
    plan_seconds = time.process_time() - started
    seconds = problem.judge(table)
    bound = problem.bounds.area
    return Result(seconds, seconds / bound, seconds / max(bound, loose_bound(problem)), plan_seconds, table)


def loose_bound(problem: Problem) -> float:
    """The prototype's bound: per sample the larger of its intra and inter seconds. A little higher, not certified."""
    shapes = problem.shapes
    unique, counts = np.unique(problem.lengths, return_counts=True)
    seconds = np.where(shapes.fits(unique), shapes.seconds(unique), np.inf)
    area = shapes.work(unique)[:, None] + np.outer(unique, np.maximum(shapes.intra, shapes.inter))
    return least_time(seconds, area, counts, problem.topology.world)


def grid_table(title: str, *columns: str) -> RichTable:
    table = RichTable(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
