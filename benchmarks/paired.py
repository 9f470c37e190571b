"""What pairs of measurements say about a ratio, with nothing assumed about how the noise is distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median of ratios, by order statistics; of under six values there is none: (0, inf)."""
    ordered, count = sorted(values), len(values)
    tail, outside = 0.0, 0
    while (tail := tail + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    return (ordered[outside - 1], ordered[count - outside]) if outside else (0.0, math.inf)


def verdict(low: float, high: float, limit: float) -> str:
    """Whether a ratio with the interval [low, high] is at most `limit`."""
    return "holds" if high <= limit else "missed" if low > limit else "undecided"
