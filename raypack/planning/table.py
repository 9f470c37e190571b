"""A plan as arrays: what the planner searches on and the cost model reads. Thousands of samples, no Python objects."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raypack.errors import RaypackError
from raypack.parallel.topology import Block, Topology
from raypack.planning.plan import ATTENTIONS, Placement, Plan, Round


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


COLUMNS = ("round", "parent_first", "parent_width", "child_first", "child_width", "attention")


@dataclass(frozen=True)
class Table:
    """All placements of a plan. Row i is sample i of `samples`; int64 arrays [samples].

    Attributes:
        round: round of each row, from 0.
        recompute: one entry a round.
        attention: index into `ATTENTIONS`.
    """

    samples: Samples
    round: np.ndarray
    parent_first: np.ndarray
    parent_width: np.ndarray
    child_first: np.ndarray
    child_width: np.ndarray
    attention: np.ndarray
    recompute: tuple[str, ...]

    @property
    def rounds(self) -> int:
        return len(self.recompute)

    @property
    def digest(self) -> bytes:
        """Of everything in it."""
        columns = (self.samples.ids, self.samples.lengths, *(getattr(self, name) for name in COLUMNS))
        made = hashlib.blake2b(repr(self.recompute).encode(), digest_size=16)
        for column in columns:
            made.update(column.tobytes())
        return made.digest()

    def in_round(self, number: int) -> RoundTable:
        """The rows of one round, in canonical order."""
        rows = np.flatnonzero(self.round == number)
        order = np.lexsort(
            (
                self.samples.ids[rows],
                self.child_first[rows],
                -self.child_width[rows],
                self.parent_first[rows],
                -self.parent_width[rows],
            )
        )
        rows = rows[order]
        return RoundTable(
            rows,
            self.samples.lengths[rows],
            self.parent_first[rows],
            self.parent_width[rows],
            self.child_first[rows],
            self.child_width[rows],
            self.attention[rows],
        )

    def canonical(self) -> Table:
        """The same plan, rows in the planner's order of samples."""
        order = self.samples.order
        return replace(self, samples=self.samples.canonical(), **{name: getattr(self, name)[order] for name in COLUMNS})

    def without_empty_rounds(self) -> Table:
        used, index = np.unique(self.round, return_inverse=True)
        if len(used) == self.rounds:
            return self
        return replace(self, round=index, recompute=tuple(self.recompute[i] for i in used))

    def to_plan(self, topology: Topology, policy: str, step: int = 0) -> Plan:
        columns = (
            self.samples.ids,
            self.samples.lengths,
            self.samples.labels,
            self.parent_first,
            self.parent_width,
            self.child_first,
            self.child_width,
            self.attention,
        )
        rounds: list[list[Placement]] = [[] for _ in self.recompute]
        blocks: dict[tuple[int, int], Block] = {}
        for number, sample, length, labels, *block, attention in zip(
            self.round.tolist(), *(column.tolist() for column in columns), strict=True
        ):
            parent, child = (block[0], block[1]), (block[2], block[3])
            rounds[number].append(
                Placement(
                    sample,
                    length,
                    blocks.setdefault(parent, Block(*parent)),
                    blocks.setdefault(child, Block(*child)),
                    labels,
                    ATTENTIONS[attention],
                )
            )
        made = tuple(Round(tuple(r), how) for r, how in zip(rounds, self.recompute, strict=True))
        return Plan(topology.nodes, made, step=step, policy=policy)


@dataclass(frozen=True)
class RoundTable:
    """The placements of one round in canonical order: int64 arrays [placements]. `row` indexes the whole table."""

    row: np.ndarray
    length: np.ndarray
    parent_first: np.ndarray
    parent_width: np.ndarray
    child_first: np.ndarray
    child_width: np.ndarray
    attention: np.ndarray

    def __len__(self) -> int:
        return len(self.length)


def table_of(plan: Plan) -> Table:
    """The arrays of a plan, rows in plan order."""
    rows = [
        (number, p.sample, p.length, p.labels, *p.parent, *p.child, ATTENTIONS.index(p.attention))
        for number, each in enumerate(plan.rounds)
        for p in each.placements
    ]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 9).T.copy()
    samples = Samples(table[1], table[2], table[3])
    return Table(
        samples, table[0], table[4], table[5], table[6], table[7], table[8], tuple(r.recompute for r in plan.rounds)
    )
