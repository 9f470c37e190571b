"""What a list of lengths looks like: percentiles, histogram, and how much of the attention work the tail holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 99.9)


@dataclass(frozen=True)
class Bin:
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int
    squares_share: float


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths in tokens, shares as fractions."""

    documents: int
    tokens: int
    mean: float
    shortest: int
    longest: int
    percentiles: dict[str, int]
    top_percent_squares_share: float
    """Share of the sum of squared lengths that the longest 1 % of the documents hold: full attention's tail."""
    histogram: tuple[Bin, ...]


def length_statistics(lengths: np.ndarray) -> LengthStatistics:
    """Statistics of int64 [documents], not empty, each at least 1."""
    ordered = np.sort(lengths)
    squares = ordered.astype(np.float64) ** 2
    top = math.ceil(len(ordered) / 100)
    # The inverted distribution function: a percentile is one of the lengths, not a mean of two.
    values = np.percentile(ordered, PERCENTILES, method="inverted_cdf")
    return LengthStatistics(
        documents=len(ordered),
        tokens=int(ordered.sum()),
        mean=float(ordered.mean()),
        shortest=int(ordered[0]),
        longest=int(ordered[-1]),
        percentiles={f"p{p:g}": int(value) for p, value in zip(PERCENTILES, values, strict=True)},
        top_percent_squares_share=float(squares[-top:].sum() / squares.sum()),
        histogram=_histogram(ordered, squares),
    )


def _histogram(ordered: np.ndarray, squares: np.ndarray) -> tuple[Bin, ...]:
    """Bins by powers of two, from the shortest's to the longest's, empty ones between them included."""
    bins, total = [], float(squares.sum())
    low = 1 << (int(ordered[0]).bit_length() - 1)
    while low <= ordered[-1]:
        first, end = np.searchsorted(ordered, (low, 2 * low))
        held = slice(first, end)
        share = float(squares[held].sum()) / total
        bins.append(Bin(low, 2 * low - 1, int(end - first), int(ordered[held].sum()), share))
        low *= 2
    return tuple(bins)
