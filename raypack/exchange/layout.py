"""Who holds which tokens and heads in a round: a pure function of its placements (docs/exchange.md).

Two layouts of the same samples:

- the *child layout*: each child block's samples, in canonical order, form a stream that is cut into `width`
  contiguous shards. A rank inside nested child blocks holds one shard of each, widest block first.
- the *head layout* of a layer kind: every rank of a sample's block B (its parent in full layers, its child in sparse
  layers) has all tokens of the sample and a share of the heads.

Placements with equal (parent, child) are neighbours in canonical order and are cut alike, so everything is computed
for such *cohorts* of placements (of one attention each): a few dozen intervals instead of thousands of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from raypack.plan.names import ATTENTIONS
from raypack.plan.plan import Round
from raypack.plan.topology import Block, Topology


@cache
def head_share(heads: int, kv_heads: int, width: int) -> tuple[tuple[int, int, int, int], ...]:
    """Heads of each of `width` ranks: (first query head, end, first KV head, end).

    Query heads are split as evenly as possible, the first ranks get the extra ones; ranks beyond the heads get none.
    A rank has the KV heads that its query heads use, so KV heads are copied where ranks outnumber them.
    """
    per_kv = heads // kv_heads
    base, extra = divmod(heads, width)
    shares = []
    for i in range(width):
        lo = i * base + min(i, extra)
        hi = lo + base + (i < extra)
        shares.append((lo, hi, lo // per_kv, (hi - 1) // per_kv + 1) if hi > lo else (lo, lo, 0, 0))
    return tuple(shares)


COHORT_KEYS = ("parent_first", "parent_width", "child_first", "child_width", "attention")


@dataclass(frozen=True)
class Cohort:
    """Neighbouring placements [first, end) of one (parent, child, attention).

    Attributes:
        cuts: int64 [child.width + 1]; rank child.first + i holds tokens [cuts[i], cuts[i + 1]) of the cohort's stream.
        rows: int64 [child.width]; the first of these tokens is this row of that rank.
    """

    first: int
    end: int
    parent: Block
    child: Block
    attention: str
    tokens: int
    cuts: tuple[int, ...]
    rows: tuple[int, ...]

    def block(self, full: bool) -> Block:
        """The block that holds this cohort's heads: the parent in full layers, else the child."""
        return self.parent if full else self.child


@dataclass(frozen=True)
class Segments:
    """Token ranges that a rank holds, in row order (int64 arrays of one length).

    `placement` indexes the layout's `placements`; the rank has tokens [low, high) of that sample.
    """

    placement: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.high - self.low

    @cached_property
    def positions(self) -> np.ndarray:
        """int64 [rows]: index of each row's token in its document."""
        sizes = self.lengths
        starts = np.cumsum(sizes) - sizes
        return np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(self.low - starts, sizes)


class Layout:
    """Child and head layouts of the part of a round that `rank` can meet: its connected component.

    Args:
        round_: the placements.
        topology: ranks and nodes.
        rank: the rank that asks; `None` lays out the whole round (tests, evaluation).
    """

    def __init__(self, round_: Round, topology: Topology, rank: int | None = None) -> None:
        self.topology = topology
        self.rank = rank
        columns = round_.columns
        keep = np.ones(len(round_.placements), dtype=bool)
        if rank is not None and len(keep):
            component = _widest_around(columns["parent_first"], columns["parent_width"], rank)
            first = columns["parent_first"]
            keep = (first >= component.first) & (first < component.end)
        self.columns = {name: column[keep] for name, column in columns.items()}
        lengths = self.columns["length"]
        #: int64 [placements + 1]: where each sample starts in the stream of all placements, in canonical order
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        self.cohorts, self._row_counts = _cut(self._cohort_bounds(), self.columns, self.offsets, topology.world)

    @cached_property
    def attentions(self) -> frozenset[str]:
        """Those that occur in it."""
        return frozenset(cohort.attention for cohort in self.cohorts)

    def _cohort_bounds(self) -> np.ndarray:
        keys = [self.columns[k] for k in COHORT_KEYS]
        if not len(keys[0]):
            return np.zeros(1, dtype=np.int64)
        changed = np.zeros(len(keys[0]) - 1, dtype=bool)
        for key in keys:
            changed |= key[1:] != key[:-1]
        return np.concatenate(([0], np.flatnonzero(changed) + 1, [len(keys[0])]))

    def keeping(self, keep: Callable[[Cohort], bool]) -> Layout:
        """The same layout without the cohorts that `keep` leaves out; rows are counted without theirs."""
        found = copy(self)
        held = np.zeros_like(self._row_counts)
        cohorts = []
        for cohort in sorted(filter(keep, self.cohorts), key=lambda r: (-r.child.width, r.child.first, r.first)):
            mine = held[cohort.child.first : cohort.child.end]
            cohorts.append(replace(cohort, rows=tuple(mine.tolist())))
            mine += np.diff(cohort.cuts)
        found.cohorts, found._row_counts = tuple(sorted(cohorts, key=lambda r: r.first)), held
        return found

    def rows(self, rank: int) -> int:
        """Tokens that `rank` holds in the child layout."""
        return int(self._row_counts[rank])

    def component(self, rank: int, full: bool) -> Block:
        """The block whose group `rank` exchanges on: the widest block around it, of parents or of children."""
        widest = Block(rank, 1)
        for cohort in self.cohorts:
            block = cohort.block(full)
            if block.width > widest.width and block.holds(rank):
                widest = block
        return widest

    def segments(self, rank: int) -> Segments:
        """What `rank` holds in the child layout, in row order: widest child block first, canonical inside it."""
        parts: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
        for cohort in self.cohorts:
            if not cohort.child.holds(rank):
                continue
            i = rank - cohort.child.first
            low, high = cohort.cuts[i], cohort.cuts[i + 1]
            if low == high:
                continue
            starts = self.offsets[cohort.first : cohort.end + 1] - self.offsets[cohort.first]
            a = int(np.searchsorted(starts, low, side="right")) - 1
            b = int(np.searchsorted(starts, high, side="left"))
            index = np.arange(a, b)
            lows = np.maximum(starts[a:b], low) - starts[a:b]
            highs = np.minimum(starts[a + 1 : b + 1], high) - starts[a:b]
            parts.append((cohort.rows[i], index + cohort.first, lows, highs))
        parts.sort(key=lambda part: part[0])
        if not parts:
            empty = np.zeros(0, dtype=np.int64)
            return Segments(empty, empty, empty)
        return Segments(*(np.concatenate([part[k] for part in parts]) for k in (1, 2, 3)))

    def lengths(self, cohort: Cohort) -> tuple[int, ...]:
        """Lengths of the cohort's samples, canonical order."""
        return tuple(self.columns["length"][cohort.first : cohort.end].tolist())


def _widest_around(firsts: np.ndarray, widths: np.ndarray, rank: int) -> Block:
    around = (firsts <= rank) & (rank < firsts + widths)
    if not around.any():
        return Block(rank, 1)
    at = int(np.argmax(np.where(around, widths, 0)))
    return Block(int(firsts[at]), int(widths[at]))


def _cut(
    bounds: np.ndarray, columns: dict[str, np.ndarray], offsets: np.ndarray, world: int
) -> tuple[tuple[Cohort, ...], np.ndarray]:
    """Cut every child block's stream into shards.

    Where tokens do not divide evenly, the extra ones go to the ranks of the block that hold the fewest tokens of
    wider blocks so far (ties: lowest rank), so that nested blocks do not all favour the same ranks.
    """
    count = len(bounds) - 1
    firsts = bounds[:-1]
    parents = list(zip(columns["parent_first"][firsts].tolist(), columns["parent_width"][firsts].tolist(), strict=True))
    children = list(zip(columns["child_first"][firsts].tolist(), columns["child_width"][firsts].tolist(), strict=True))
    attentions = columns["attention"][firsts].tolist()
    tokens = (offsets[bounds[1:]] - offsets[firsts]).tolist()
    of_child: dict[tuple[int, int], list[int]] = {}
    for i in range(count):
        of_child.setdefault(children[i], []).append(i)
    held = np.zeros(world, dtype=np.int64)
    cohorts: list[Cohort | None] = [None] * count
    for (first, width), members in sorted(of_child.items(), key=lambda item: (-item[0][1], item[0][0])):
        mine = held[first : first + width]
        base, extra = divmod(sum(tokens[i] for i in members), width)
        sizes = np.full(width, base, dtype=np.int64)
        sizes[np.argsort(mine, kind="stable")[:extra]] += 1
        edges = np.concatenate(([0], np.cumsum(sizes)))
        start = 0
        for i in members:
            cuts = np.clip(edges - start, 0, tokens[i])
            rows = mine + np.maximum(start - edges[:-1], 0)
            cohorts[i] = Cohort(
                first=int(bounds[i]),
                end=int(bounds[i + 1]),
                parent=Block(*parents[i]),
                child=Block(first, width),
                attention=ATTENTIONS[attentions[i]],
                tokens=tokens[i],
                cuts=tuple(cuts.tolist()),
                rows=tuple(rows.tolist()),
            )
            start += tokens[i]
        held[first : first + width] = mine + sizes
    return tuple(cohort for cohort in cohorts if cohort is not None), held
