"""Strategies (Hydraulis, arXiv 2412.07894): a pool made offline from the length histogram, the best of it each step.

A strategy is a multiset of group widths with parent = child, and a recompute. Offline, dynamic programming over
(ranks used, longest length served) splits the histogram into consecutive length ranges, each served by groups of one
width, so that the slowest range takes least; one optimum for every longest length makes the pool. Online, stage 1
dispatches a step's samples to the groups of each strategy (makespan), stage 2 packs each group's samples into rounds
(linear memory, quadratic time), and the strategy with the shortest step wins. Parameters are sharded independently of
all this, so changing the strategy from step to step costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypack.config import ClusterConfig, ModelConfig
from raypack.cost.rates import ITEMSIZE
from raypack.errors import RaypackError
from raypack.layers.costs import Costs
from raypack.plan.names import RECOMPUTES
from raypack.plan.plan import Plan
from raypack.plan.samples import Samples
from raypack.plan.table import Table
from raypack.plan.topology import Block, Topology
from raypack.planning.problem import Problem
from raypack.planning.shapes import Shapes, shapes
from raypack.planning.uniform import tile_table

BUCKETS = 32
"""Length ranges of the histogram at most."""

UNITS = 64
"""Equal parts of the world that the dynamic program hands out at most."""


@dataclass(frozen=True, order=True)
class Strategy:
    """Groups side by side: widths, widest first, together at most the world; made for samples up to `longest`."""

    widths: tuple[int, ...]
    recompute: str
    longest: int

    def __str__(self) -> str:
        counted = sorted(Counter(self.widths).items(), reverse=True)
        return " + ".join(f"{count} x {width}" for width, count in counted)


def propose(
    lengths: np.ndarray,
    topology: Topology,
    cluster: ClusterConfig,
    model: ModelConfig,
    *,
    step_tokens: int = 0,
    itemsize: int = ITEMSIZE,
) -> tuple[Strategy, ...]:
    """The pool for a histogram of lengths, for every recompute that has a cap of its own. Widest groups first.

    Args:
        lengths: of many documents.
        step_tokens: tokens of one step, of which the histogram gives the mix; 0 = the lengths are one step.

    Raises:
        RaypackError: no length, or one that fits no block.
    """
    ordered = np.sort(Samples.of_lengths(lengths).lengths)
    scale = step_tokens / ordered.sum() if step_tokens else 1.0
    costs = Costs(model, cluster, itemsize)
    pool: dict[tuple[tuple[int, ...], str], int] = {}
    for recompute in RECOMPUTES:
        if recompute != "none" and costs.cap(recompute) == costs.cap("none"):
            continue
        equal = shapes(topology, costs, recompute)
        equal = equal.select(equal.parent == equal.child)
        for widths, longest in _optima(ordered, scale, topology.world, equal):
            if blocks_of(topology, widths) is not None:
                key = (widths, recompute)
                pool[key] = max(longest, pool.get(key, 0))
    if not any(longest == ordered[-1] for longest in pool.values()):
        raise RaypackError(
            f"strategies: length = {ordered[-1]} fits no block of {topology.world} ranks at the cap of "
            f"{cluster.rank_tokens_max} tokens a rank (rank_tokens_max); raise it or add ranks"
        )
    found = [Strategy(widths, recompute, longest) for (widths, recompute), longest in pool.items()]
    return tuple(sorted(found, reverse=True))


def _optima(lengths: np.ndarray, scale: float, world: int, equal: Shapes) -> list[tuple[tuple[int, ...], int]]:
    """(widths, longest length) of the best groups for every longest length; a step holds `scale` of the lengths.

    `best[b, u]` is the time of the slowest range where u units of ranks serve all lengths up to edge b.
    """
    seconds = np.where(equal.fits(lengths), equal.seconds(lengths), np.inf)
    work = np.cumsum((seconds * equal.parent).min(axis=1, initial=np.inf, where=np.isfinite(seconds)))
    cuts = np.searchsorted(work, work[-1] * np.arange(1, BUCKETS + 1) / BUCKETS)
    edges = np.unique(lengths[np.minimum(cuts, len(lengths) - 1)])
    ends = np.searchsorted(lengths, edges, side="right")
    total = scale * np.cumsum(np.where(np.isfinite(seconds), seconds, 0.0), axis=0)
    unit = -(-world // UNITS)
    units = world // unit
    used, spare = np.arange(1, units + 1), np.arange(units + 1)[:, None] - np.arange(1, units + 1)
    best = np.full((len(edges) + 1, units + 1), np.inf)
    best[0] = 0.0
    back: dict[tuple[int, int], tuple[int, int, int]] = {}
    for b in range(1, len(edges) + 1):
        for a in range(b):
            share = total[ends[b - 1] - 1] - (total[ends[a - 1] - 1] if a else 0.0)
            for column, width in enumerate(equal.parent.tolist()):
                own = seconds[ends[b - 1] - 1, column]
                whole = (used * unit) % width == 0
                if not np.isfinite(own) or not whole.any():
                    continue
                each = np.where(whole, np.maximum(share[column] * width / (used * unit), own), np.inf)
                times = np.where(spare >= 0, np.maximum(best[a][np.maximum(spare, 0)], each), np.inf)
                at = times.argmin(axis=1)
                least = times[np.arange(units + 1), at]
                for u in np.flatnonzero(least < best[b]).tolist():
                    best[b, u], back[b, u] = least[u], (a, int(used[at[u]]), width)
    served = [b for b in range(1, len(edges) + 1) if np.isfinite(best[b, units])]
    return [(_trace(back, b, units, unit), int(edges[b - 1])) for b in served]


def _trace(back: dict[tuple[int, int], tuple[int, int, int]], b: int, units: int, unit: int) -> tuple[int, ...]:
    """Widths of the groups behind `best[b, units]`, widest first."""
    widths: list[int] = []
    while b:
        b_before, used, width = back[b, units]
        widths += [width] * (used * unit // width)
        b, units = b_before, units - used
    return tuple(sorted(widths, reverse=True))


def blocks_of(topology: Topology, widths: Sequence[int]) -> tuple[Block, ...] | None:
    """Disjoint blocks of these widths, widest first from rank 0; None where they do not fit side by side."""
    taken = np.zeros(topology.world, dtype=bool)
    found = []
    for width in widths:
        block = next((b for b in topology.blocks_of_width(width) if not taken[b.first : b.end].any()), None)
        if block is None:
            return None
        taken[block.first : block.end] = True
        found.append(block)
    return tuple(found)


def strategy_table(problem: Problem, strategy: Strategy) -> Table | None:
    """The step on one strategy's groups; None where its groups do not fit the topology or hold the longest sample."""
    blocks = blocks_of(problem.topology, strategy.widths)
    equal = problem.equal_shapes
    holds = equal.fits(problem.lengths[:1])[0] & np.isin(equal.parent, strategy.widths)
    if blocks is None or not holds.any():
        return None
    return tile_table(problem, blocks)


def strategy_plan(
    samples: Samples,
    topology: Topology,
    cluster: ClusterConfig,
    model: ModelConfig,
    pool: Sequence[Strategy],
    *,
    step: int = 0,
    itemsize: int = ITEMSIZE,
) -> tuple[Plan, Strategy]:
    """The best plan of a step over the pool (policy name `strategy`), and the strategy it uses.

    Raises:
        RaypackError: no strategy of the pool holds the step's longest sample.
    """
    costs = Costs(model, cluster, itemsize)
    best: tuple[float, Table, Strategy] | None = None
    canonical, recomputes = samples.canonical(), {s.recompute for s in pool}
    problems = {how: Problem(canonical, topology, costs, cluster.sync, 0, how, 0) for how in recomputes}
    for strategy in pool:
        problem = problems[strategy.recompute]
        table = strategy_table(problem, strategy)
        if table is not None:
            seconds = problem.judge(table)
            if np.isfinite(seconds) and (best is None or seconds < best[0]):
                best = (seconds, table, strategy)
    if best is None:
        longest = max((s.longest for s in pool), default=0)
        raise RaypackError(
            f"sample of {samples.lengths.max()} tokens: no strategy of the pool holds it (longest {longest}); "
            "propose a pool from lengths that reach it"
        )
    return best[1].to_plan(topology, "strategy", step), best[2]
