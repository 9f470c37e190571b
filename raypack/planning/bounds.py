"""Floors under the seconds of every plan of a step (docs/planning.md).

- The *plain bound*: work without communication spread over all ranks, or the slowest sample at its best shape.
- The *area bound*: least T with  sum over samples of min{area(shape) : seconds(shape) <= T} <= ranks x T.
  A rank that exchanges takes the larger of its intra and inter seconds, which is at least v x intra + (1 - v) x inter
  for any v; with one v for all samples the sum over ranks stays below ranks x T. The largest such T over a few v.

Both hold for every `sync` and every policy. `least_time` is exact: the left side is a step function of T.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.planning.shapes import MIXES, Shapes


@dataclass(frozen=True)
class Bounds:
    """Seconds. `mix` is the v that gave the area bound."""

    area: float
    plain: float
    mix: float


def bounds(shapes: Shapes, lengths: np.ndarray, ranks: int, cap: int = 0) -> Bounds:
    """Both floors for one step; `lengths` must fit somewhere under `cap` (0: that of the shapes' recompute)."""
    unique, counts = np.unique(lengths, return_counts=True)
    seconds = np.where(shapes.fits(unique, cap), shapes.seconds(unique), np.inf)
    slowest = float(seconds.min(axis=1).max())
    plain = max(float(shapes.work(unique) @ counts) / ranks, slowest)
    found = [(least_time(seconds, shapes.area(unique, mix), counts, ranks), mix) for mix in MIXES]
    area, mix = max(found, key=lambda each: each[0])
    return Bounds(max(area, plain), plain, mix)


def least_time(seconds: np.ndarray, area: np.ndarray, counts: np.ndarray, ranks: int) -> float:
    """Least T with `sum of counts x (least area among shapes with seconds <= T) <= ranks x T`.

    Args:
        seconds, area: [lengths, shapes]; infinite seconds = the shape does not fit.
        counts: samples of each length.
    """
    order = np.argsort(seconds, axis=1, kind="stable")
    times = np.take_along_axis(seconds, order, axis=1)
    least = np.minimum.accumulate(np.take_along_axis(area, order, axis=1), axis=1)
    steps = np.diff(least, axis=1, prepend=0.0) * counts[:, None]
    keep = np.isfinite(times) & (steps != 0)
    at, change = times[keep], steps[keep]
    by_time = np.argsort(at, kind="stable")
    # Before the first step no area is taken. It may be the only interval: children wider than their documents are long
    # take none, where there are no S layers.
    at, total = np.append(0.0, at[by_time]), np.append(0.0, np.cumsum(change[by_time]))
    start = float(times[:, 0].max())
    # Total area is valid from `at` until the next step; before `start` some sample has no shape at all.
    until = np.append(at[1:], np.inf)
    candidate = np.maximum(np.maximum(at, start), total / ranks)
    return float(candidate[candidate < until].min())
