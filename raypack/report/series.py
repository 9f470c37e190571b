"""Records as columns for plots: one value a step, long runs averaged down to as many points as a picture can show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from raypack.observe.record import StepRecord, by_scope

POINTS_MAX = 600


@dataclass(frozen=True, eq=False)
class Columns:
    """Effective records of a run, in order; each of `points` stands for `group` of them (the last for fewer)."""

    records: Sequence[StepRecord]
    group: int

    @property
    def steps(self) -> np.ndarray:
        """float64 [points]."""
        return self.of(lambda record: record.step)

    def of(self, get: Callable[[StepRecord], float | None]) -> np.ndarray:
        """float64 [points]: the mean over each group; NaN where no record of it has a value."""
        return self.means([np.nan if (v := get(r)) is None else float(v) for r in self.records])

    def means(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """float64 [points]: as `of`, of one value for each record."""
        return _grouped(np.asarray(values, dtype=np.float64)[:, None], self.group)[:, 0]

    def ranks(self, get: Callable[[StepRecord], Sequence[float | None]]) -> np.ndarray:
        """float64 [points, ranks], NaN for ranks that are not there."""
        world = max((len(get(record)) for record in self.records), default=0)
        values = np.full((len(self.records), world), np.nan)
        for row, record in zip(values, self.records, strict=True):
            mine = get(record)
            row[: len(mine)] = [np.nan if v is None else v for v in mine]
        return _grouped(values, self.group)

    def named(self, get: Callable[[StepRecord], dict[str, float]]) -> dict[str, np.ndarray]:
        """`{name: float64 [points]}` for every name that occurs; 0 where a record lacks it, NaN where it has none."""
        each = [get(record) for record in self.records]
        names = dict.fromkeys(name for one in each for name in one)
        return {name: self.means([one.get(name, 0.0) if one else np.nan for one in each]) for name in names}


def columns(records: Sequence[StepRecord], points: int = POINTS_MAX) -> Columns:
    """Of resolved records (`steps.resolve`): those that count and have facts."""
    kept = [record for record in records if record.effective and record.sample_count > 0]
    return Columns(kept, max(1, -(-len(kept) // points)))


def scope_bytes(record: StepRecord, scope: str, policy: str = "") -> float | None:
    """Exchange bytes of a step in `scope`: sent, or of the `static` or `dynamic` plan; None where not recorded."""
    counts = {"": record.comparable_bytes, "static": record.bytes_static, "dynamic": record.bytes_dynamic}[policy]
    return by_scope(counts)[scope] if counts or not policy else None


def _grouped(values: np.ndarray, group: int) -> np.ndarray:
    """Means over `group` rows, NaN left out; [rows, columns] -> [ceil(rows / group), columns]."""
    if group == 1 or not len(values):
        return values
    starts = np.arange(0, len(values), group)
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.float64), starts, axis=0)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
