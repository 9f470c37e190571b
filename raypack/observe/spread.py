"""A figure of many ranks in few numbers: what a record keeps of a world that is too large for lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

# Lists of so many ranks are as short as the rest of a record.
LISTED_MAX = 64
SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)
WORST = 5


class Spread(BaseModel):
    """Over the ranks that reported."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    mean: float
    quantiles: tuple[float, float, float, float, float] = Field(description="at `SHARES` of the ranks")
    worst: tuple[tuple[int, str, float], ...] = Field(description="(rank, node, value), the largest first")

    @property
    def most(self) -> float:
        return self.quantiles[-1]


def spread_of(values: Sequence[float | None], nodes: Sequence[str]) -> Spread | None:
    """Of values and nodes by rank, None where a rank did not report; None where no rank did."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    ranks = np.flatnonzero(np.isfinite(array))
    if not len(ranks):
        return None
    known = array[ranks]
    largest = np.argsort(-known, kind="stable")[:WORST]
    return Spread(
        mean=round(float(known.mean()), 6),
        quantiles=tuple(round(float(value), 6) for value in np.quantile(known, SHARES)),
        worst=tuple((int(ranks[i]), nodes[ranks[i]], round(float(known[i]), 6)) for i in largest),
    )
