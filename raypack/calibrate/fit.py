"""The straight line that a calibration puts through its points: seconds = fixed + amount / rate (pure)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.errors import RaypackError


@dataclass(frozen=True)
class Series:
    """Measured points: `amounts` (FLOPs or bytes of one rank) took `seconds` each."""

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class LineFit:
    """seconds = fixed + amount / rate.

    Attributes:
        fixed: seconds at no amount: latency or launch; never negative.
        rate: amount a second.
        r_squared: share of the variance of the seconds that the line explains (1 = all).
        worst: largest |line / measured - 1| of a point.
        points: how many there were.
    """

    fixed: float
    rate: float
    r_squared: float
    worst: float
    points: int

    def seconds(self, amount: float) -> float:
        return self.fixed + amount / self.rate


def fit_line(series: Series, what: str) -> LineFit:
    """Least squares of the *relative* error, so that small amounts count as much as large ones and fix the latency.

    A line that would start below zero starts at zero instead.

    Raises:
        RaypackError: fewer than two different amounts, seconds that are not positive, or seconds that do not grow.
    """
    x = np.array(series.amounts, dtype=np.float64)
    y = np.array(series.seconds, dtype=np.float64)
    if len(np.unique(x)) < 2 or len(x) != len(y):
        raise RaypackError(f"{what}: {len(x)} amounts, {len(y)} times; a line needs two or more different amounts")
    if not (np.isfinite(y).all() and (y > 0).all()):
        raise RaypackError(f"{what}: measured {y.min():g} s; times must be positive, measure again with more repeats")
    fixed, slope = _solve(x / y, 1 / y)
    if fixed < 0:
        fixed, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    if slope <= 0:
        raise RaypackError(
            f"{what}: {x.min():g} to {x.max():g} took {y[x.argmin()]:.3g} to {y[x.argmax()]:.3g} s, no growth to fit; "
            "the machine is busy with other work, measure again with more repeats"
        )
    line = fixed + slope * x
    variance = float(((y - y.mean()) ** 2).sum())
    r_squared = 1 - float(((y - line) ** 2).sum()) / variance if variance else 1.0
    return LineFit(fixed, 1 / slope, r_squared, float(np.abs(line / y - 1).max()), len(x))


def _solve(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """(fixed, slope) with least sum of (fixed * b + slope * a - 1) ** 2; columns are scaled for the solver's sake."""
    scale = np.array([b.max(), a.max()])
    solution, *_ = np.linalg.lstsq(np.stack([b, a], axis=1) / scale, np.ones(len(a)), rcond=None)
    fixed, slope = solution / scale
    return float(fixed), float(slope)
