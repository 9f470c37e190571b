"""The documents of one step, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypack.errors import RaypackError


@dataclass(frozen=True)
class Samples:
    """The documents of one step: int64 arrays [samples]; `labels` = tokens that carry a label.

    Raises:
        RaypackError: no sample, arrays of unequal length, a length below 1, labels out of range, an id twice.
    """

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        for name in ("ids", "lengths", "labels"):
            object.__setattr__(self, name, _integers(getattr(self, name), name))
        if len(self.ids) == 0:
            raise RaypackError("samples: there is none; a step needs at least one")
        if not len(self.ids) == len(self.lengths) == len(self.labels):
            raise RaypackError(
                f"samples: {len(self.ids)} ids, {len(self.lengths)} lengths, {len(self.labels)} labels; give one each"
            )
        if (at := int(self.lengths.argmin())) >= 0 and self.lengths[at] < 1:
            raise RaypackError(f"sample {self.ids[at]}: length = {self.lengths[at]}: must be at least 1")
        wrong = np.flatnonzero((self.labels < 0) | (self.labels > self.lengths))
        if len(wrong):
            at = int(wrong[0])
            raise RaypackError(
                f"sample {self.ids[at]}: labels = {self.labels[at]}: must lie in 0..{self.lengths[at]} (its length)"
            )
        if len(np.unique(self.ids)) < len(self.ids):
            values, counts = np.unique(self.ids, return_counts=True)
            raise RaypackError(f"sample {values[counts > 1][0]} occurs twice in the step; give each sample once")

    @classmethod
    def of_lengths(cls, lengths: Sequence[int] | np.ndarray) -> Samples:
        """Plain-text samples: id = index, all tokens but the last have a label."""
        n = _integers(lengths, "lengths")
        return cls(np.arange(len(n)), n, np.maximum(n - 1, 0))

    @property
    def order(self) -> np.ndarray:
        """Indices that sort longest first, then by id: the planner's order, whatever order they came in."""
        return np.lexsort((self.ids, -self.lengths))

    def canonical(self) -> Samples:
        """The samples in the planner's order."""
        order = self.order
        return Samples(self.ids[order], self.lengths[order], self.labels[order])


def _integers(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RaypackError(f"samples: {name} must be one row of integers, not {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)
