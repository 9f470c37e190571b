"""What the gather of states asks of every rank."""

from __future__ import annotations

import numpy as np

from raypack.cost.costs import PASSES, Costs
from raypack.cost.gathered import Gathered
from raypack.plan.grid import Grid, unions


def gather_states(
    child_first: np.ndarray, child_width: np.ndarray, where: Grid, costs: Costs, recompute: str
) -> Gathered:
    """The states of one L layer of a round, from its child blocks."""
    found, passes = Gathered.nothing(len(where.node)), PASSES[recompute].exchange
    for a, b in zip(*(x.tolist() for x in unions(child_first, child_width)), strict=True):
        if b - a > 1:
            inside = (child_first >= a) & (child_first < b) & (child_width > 1)
            size = len(np.unique(child_width[inside])) * costs.state_bytes(recompute)
            found.send(slice(a, b), size, passes * costs.state_calls, where, costs)
    return found
