"""A plan as arrays: what the planner searches on and the cost model reads. Thousands of samples, no Python objects."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from raypack.plan.names import ATTENTIONS
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.samples import Samples
from raypack.plan.topology import Block, Topology

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
