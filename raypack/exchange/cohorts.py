"""The shards of a round for all ranks at once, as arrays over *cohorts* (docs/planning.md).

A cohort is the neighbouring placements with equal parent, child and attention: they are cut alike. The shards are those
of `layout`, which knows one rank at a time (a test compares them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from raypack.plan.grid import Grid, spread, unions
from raypack.plan.table import RoundTable


@dataclass(frozen=True)
class Cohorts:
    """Arrays [cohorts] in canonical order.

    Attributes:
        low, high: token interval on the axis of all child streams.
        edge: where the stream's shards begin in `Shards.edges`.
        number: which cohort it is of all.
    """

    parent_first: np.ndarray
    parent_width: np.ndarray
    child_first: np.ndarray
    child_width: np.ndarray
    attention: np.ndarray
    tokens: np.ndarray
    low: np.ndarray
    high: np.ndarray
    edge: np.ndarray
    number: np.ndarray

    def select(self, mask: np.ndarray) -> Cohorts:
        return self if mask.all() else Cohorts(*(getattr(self, each.name)[mask] for each in fields(self)))

    def components(self, where: Grid) -> Iterator[tuple[slice, bool]]:
        """Ranks of each widest parent of two ranks or more, and whether it crosses nodes."""
        for a, b in zip(*(x.tolist() for x in unions(self.parent_first, self.parent_width)), strict=True):
            if b - a > 1:
                yield slice(a, b), bool(where.node[a] != where.node[b - 1])


@dataclass(frozen=True)
class Held:
    """Who holds what of each cohort: one entry for every rank of its parent.

    `own` = its tokens on the rank, `node` = on the rank's node, `others` = on other nodes.
    """

    cohort: np.ndarray
    rank: np.ndarray
    own: np.ndarray
    node: np.ndarray
    others: np.ndarray


@dataclass(frozen=True)
class Shards:
    """A round cut into shards.

    Attributes:
        cohorts: of the placements, as full layers see them.
        streams: the child streams as cohorts of their own, with the child in the place of the parent: what layers at
            the child see.
        stream_of: index into `streams` of each cohort.
        edges: shard borders of all child streams on one token axis.
        tokens: int64 [world], child tokens of every rank.
        starts: first placement of each cohort.
    """

    rows: RoundTable
    where: Grid
    cohorts: Cohorts
    streams: Cohorts
    stream_of: np.ndarray
    edges: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray

    @property
    def world(self) -> int:
        return len(self.where.node)

    def of_cohorts(self, values: np.ndarray) -> np.ndarray:
        """Sums over the documents of each cohort, from one value a placement: [cohorts]."""
        return np.add.reduceat(values, self.starts) if len(values) else np.zeros(0)

    def of_streams(self, values: np.ndarray) -> np.ndarray:
        """The same for the child streams."""
        return np.bincount(self.stream_of, self.of_cohorts(values), len(self.streams.tokens))

    def held(self, cohorts: Cohorts) -> Held:
        cohort = np.repeat(np.arange(len(cohorts.tokens)), cohorts.parent_width)
        begin = np.cumsum(cohorts.parent_width) - cohorts.parent_width
        rank = cohorts.parent_first[cohort] + np.arange(len(cohort)) - begin[cohort]
        first, width, edge = cohorts.child_first[cohort], cohorts.child_width[cohort], cohorts.edge[cohort]
        low, high = cohorts.low[cohort], cohorts.high[cohort]

        def before(limit: np.ndarray) -> np.ndarray:
            """Axis position up to which the ranks below `limit` hold the cohort."""
            return np.clip(self.edges[edge + np.clip(limit - first, 0, width)], low, high)

        own = before(rank + 1) - before(rank)
        node = before(self.where.node_end[rank]) - before(self.where.node_first[rank])
        return Held(cohort, rank, own, node, cohorts.tokens[cohort] - node)

    def documents(self, cohorts: Cohorts) -> Documents:
        """The documents of some cohorts, with their place on the axis."""
        cohort = np.repeat(np.arange(len(self.cohorts.tokens)), np.diff(np.append(self.starts, len(self.rows))))
        end, all_ = np.cumsum(self.rows.length), self.cohorts
        before = np.cumsum(all_.tokens) - all_.tokens
        at = all_.low[cohort] + end - self.rows.length - before[cohort]
        mine = np.isin(cohort, cohorts.number)
        rows = self.rows
        every = Documents(
            length=rows.length,
            parent_first=rows.parent_first,
            parent_width=rows.parent_width,
            child_first=rows.child_first,
            child_width=rows.child_width,
            at=at,
            edge=all_.edge[cohort],
        )
        return every.select(mine)


@dataclass(frozen=True)
class Documents:
    """int64 arrays [documents], in canonical order. `at` is the document's first token on the axis of all child
    streams; edges[edge : edge + child_width + 1] are its stream's shards on that axis."""

    length: np.ndarray
    parent_first: np.ndarray
    parent_width: np.ndarray
    child_first: np.ndarray
    child_width: np.ndarray
    at: np.ndarray
    edge: np.ndarray

    def select(self, mask: np.ndarray) -> Documents:
        return Documents(*(getattr(self, each.name)[mask] for each in fields(self)))


def cut_round(rows: RoundTable, where: Grid) -> Shards:
    """Cut the child streams of a round, in canonical order, into shards."""
    keys = (rows.parent_first, rows.parent_width, rows.child_first, rows.child_width, rows.attention)
    changed = np.zeros(max(len(rows) - 1, 0), dtype=bool)
    for key in keys:
        changed |= key[1:] != key[:-1]
    starts = np.concatenate(([0], np.flatnonzero(changed) + 1)) if len(rows) else np.zeros(0, dtype=np.int64)
    parent_first, parent_width, child_first, child_width, attention = (key[starts] for key in keys)
    tokens = np.add.reduceat(rows.length, starts) if len(rows) else starts
    # Streams stand one after another on the axis, widest children first; canonical order inside a stream.
    order = np.lexsort((np.arange(len(starts)), child_first, -child_width))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(child_first[order]) != 0) | (np.diff(child_width[order]) != 0)
    high = np.empty_like(tokens)
    high[order] = np.cumsum(tokens[order])
    heads = order[new]
    stream_low = high[heads] - tokens[heads]
    stream_tokens = np.diff(np.append(stream_low, tokens.sum()))
    edges, edge_at, held = _cut(child_first[heads], child_width[heads], stream_low, stream_tokens, len(where.node))
    edge = np.empty_like(tokens)
    edge[order] = edge_at[np.cumsum(new) - 1]
    number = np.arange(len(tokens))
    columns = (parent_first, parent_width, child_first, child_width, attention, tokens, high - tokens, high, edge)
    cohorts = Cohorts(*columns, number)
    streams, stream_of = _streams(cohorts)
    return Shards(rows, where, cohorts, streams, stream_of, edges, held, starts)


def _cut(
    first: np.ndarray, width: np.ndarray, low: np.ndarray, tokens: np.ndarray, world: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut streams (widest first) into shards: edges [sum of width + 1], each stream's first edge, tokens [world]."""
    edge_at = np.concatenate(([0], np.cumsum(width + 1)[:-1])) if len(width) else width
    edges = np.empty(int((width + 1).sum()), dtype=np.int64)
    held = np.zeros(world, dtype=np.int64)
    for each in np.unique(width)[::-1]:
        streams = np.flatnonzero(width == each)
        ranks = first[streams, None] + np.arange(each)
        base, extra = np.divmod(tokens[streams], each)
        sizes = np.repeat(base[:, None], each, axis=1)
        if each > 1:
            # The extra tokens go to the ranks with fewest tokens of wider blocks, ties to the lowest rank.
            poorest = np.argsort(held[ranks], axis=1, kind="stable")
            np.put_along_axis(sizes, poorest, base[:, None] + (np.arange(each) < extra[:, None]), axis=1)
        held[ranks] += sizes
        at = edge_at[streams, None] + np.arange(each + 1)
        begin = np.zeros((len(streams), 1), np.int64)
        edges[at] = low[streams, None] + np.concatenate((begin, sizes.cumsum(1)), axis=1)
    return edges, edge_at, held


def _streams(cohorts: Cohorts) -> tuple[Cohorts, np.ndarray]:
    """The child streams as cohorts, and the stream of each cohort."""
    _, first, index = np.unique(cohorts.edge, return_index=True, return_inverse=True)
    count = len(first)
    low = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(low, index, cohorts.low)
    tokens = np.bincount(index, cohorts.tokens, count).astype(np.int64)
    child = cohorts.child_first[first], cohorts.child_width[first]
    heads = np.zeros(count, dtype=np.int64)  # layers at the child exchange heads, whatever full layers do
    return Cohorts(*child, *child, heads, tokens, low, low + tokens, cohorts.edge[first], np.arange(count)), index


def launches(cohorts: Cohorts, world: int) -> np.ndarray:
    """Attention calls of every rank in one pass: one a block of its own (blocks around a rank differ in width)."""
    blocks = np.unique(cohorts.parent_first * (world + 1) + cohorts.parent_width)
    first, width = np.divmod(blocks, world + 1)
    return spread(first, first + width, world)
