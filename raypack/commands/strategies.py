"""What `raypack plan --strategies` adds: the pool of strategies for the given lengths, beside `dynamic`."""

from __future__ import annotations

from typing import Any

from rich.table import Table as RichTable

from raypack.config import ClusterConfig, ModelConfig
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import make_plan
from raypack.planning.strategy import Strategy, propose, strategy_plan


def compare_strategies(
    samples: Samples, topology: Topology, cluster: ClusterConfig, model: ModelConfig
) -> dict[str, Any]:
    """The pool, its best plan's seconds and widths, and the seconds of `dynamic`, which needs no pool."""
    pool = propose(samples.lengths, topology, cluster, model)
    best, chosen = strategy_plan(samples, topology, cluster, model, pool)
    dynamic = make_plan(samples, topology, cluster, model, "dynamic")
    return {
        "pool": [{"widths": list(s.widths), "recompute": s.recompute, "longest": s.longest} for s in pool],
        "chosen": pool.index(chosen),
        "seconds": evaluate(best, cluster, model).seconds,
        "dynamic_seconds": evaluate(dynamic, cluster, model).seconds,
    }


def strategy_table(found: dict[str, Any]) -> RichTable:
    table = RichTable(title="pool of strategies: groups side by side, parent = child")
    table.add_column("groups (count x width)")
    table.add_column("recompute")
    table.add_column("samples up to (tokens)", justify="right")
    table.add_column("")
    for at, each in enumerate(found["pool"]):
        strategy = Strategy(tuple(each["widths"]), each["recompute"], each["longest"])
        mark = "best for this step" if at == found["chosen"] else ""
        table.add_row(str(strategy), strategy.recompute, f"{strategy.longest:,}", mark)
    table.caption = f"best strategy {found['seconds']:.4f} s, dynamic {found['dynamic_seconds']:.4f} s"
    return table
