"""Which full attention a placement gets where that is free to choose: exchange heads, or gather K and V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raypack.plan.names import KV_GATHER
from raypack.plan.table import Table
from raypack.planning.problem import Problem


def gather_where_cheaper(problem: Problem, table: Table) -> Table:
    """`table` with K and V gathered, block width by block width, wherever that makes the step shorter.

    Only samples whose parent is their child can gather. Documents of one block are switched together: they share its
    gather, and alone each would pad it for the rest.
    """
    best, seconds = table, problem.judge(table)
    free = (table.parent_width > 1) & (table.parent_width == table.child_width)
    for width in np.unique(table.parent_width[free])[::-1].tolist():
        mine = free & (table.parent_width == width)
        changed = replace(best, attention=np.where(mine, KV_GATHER, best.attention))
        value = problem.judge(changed)
        if value < seconds:
            best, seconds = changed, value
    return best
