"""The hsap part of a layout around one rank: which node and which head share it is, and whose tokens are where.

A cohort is *spread* where its attention is hsap and its parent spans nodes: heads are then split over the ranks of each
node and the segments of its documents over the nodes. (Inside one node hsap is nothing but the exchange of heads.)
Spread parents are nested or disjoint, and nodes inside the widest are of one size: a rank has one share of the heads,
and one schedule for all spread parents inside the widest around it, since ticks must have one number everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.exchange.hsap.schedule import Schedule, Signature, schedule_of
from raypack.exchange.hsap.transfers import STEP_ROWS, Pack
from raypack.exchange.layout import Cohort, Layout
from raypack.plan.topology import Block


def is_spread(layout: Layout, cohort: Cohort) -> bool:
    return cohort.attention == "hsap" and not layout.topology.in_one_node(cohort.parent)


@dataclass(frozen=True)
class Spread:
    """
    Attributes:
        block: the widest spread parent around the rank.
        width: ranks of one of its nodes.
        share: index of the rank in its node, which is its share of the heads.
        placements: int64, the layout's placements of all spread parents inside the block, in canonical order: the
            schedule's documents.
    """

    block: Block
    width: int
    share: int
    placements: np.ndarray
    schedule: Schedule

    def node_of(self, rank: int) -> int:
        """Node of a rank of the block, counted from the block's first."""
        return (rank - self.block.first) // self.width

    def rank_at(self, node: int) -> int:
        """The rank of a node with the same share of the heads."""
        return self.block.first + node * self.width + self.share

    def node_block(self, node: int) -> Block:
        return Block(self.block.first + node * self.width, self.width)

    def parts(self, layout: Layout, cohort: Cohort, low: int, high: int) -> list[tuple[int, int, int]]:
        """(node, low, high) of the tokens [low, high) of a cohort's stream, in order, neighbours joined."""
        node, lows, highs = self._stream(layout, cohort)
        lows, highs = np.maximum(lows, low), np.minimum(highs, high)
        keep = highs > lows
        node, lows, highs = node[keep], lows[keep], highs[keep]
        if not len(node):
            return []
        new = np.flatnonzero(np.append(True, node[1:] != node[:-1]))
        last = np.append(new[1:], len(node)) - 1
        return list(zip(node[new].tolist(), lows[new].tolist(), highs[last].tolist(), strict=True))

    def _stream(self, layout: Layout, cohort: Cohort) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(node, low, high) of the segments of a cohort's documents, in the cohort's stream."""
        segments = self.schedule.segments
        a, b = np.searchsorted(segments.document, self._documents(cohort))
        start = layout.offsets[self.placements[segments.document[a:b]]] - layout.offsets[cohort.first]
        return segments.node[a:b], start + segments.low[a:b], start + segments.high[a:b]

    def lengths(self, cohort: Cohort) -> tuple[int, ...]:
        """Local tokens of each of the cohort's documents."""
        first, end = self._documents(cohort)
        return self.schedule.lengths[first:end]

    def bounds(self, layout: Layout, cohort: Cohort) -> tuple[int, ...]:
        """Local rows of the cohort before the shard of each rank of its child, and all of them."""
        node, low, high = self._stream(layout, cohort)
        low, high = low[node == self.schedule.node], high[node == self.schedule.node]
        before = np.concatenate(([0], np.cumsum(high - low)))
        cuts = np.array(cohort.cuts, dtype=np.int64)
        at = np.searchsorted(low, cuts, side="right")
        # Segments up to `at` start before the cut; only the last of them may go beyond it.
        beyond = np.maximum(np.append(0, high)[at] - cuts, 0)
        return tuple((before[at] - beyond).tolist())

    def _documents(self, cohort: Cohort) -> tuple[int, int]:
        first, end = np.searchsorted(self.placements, (cohort.first, cohort.end))
        return int(first), int(end)


def build_spread(layout: Layout, rank: int, step_rows: int = STEP_ROWS) -> Spread | None:
    """The hsap part of a layout around `rank`; None where there is none."""
    spread = [cohort for cohort in layout.cohorts if is_spread(layout, cohort)]
    around = [cohort.parent for cohort in spread if cohort.parent.holds(rank)]
    if not around:
        return None
    block = max(around, key=lambda b: b.width)
    cohorts = [cohort for cohort in spread if block.contains(cohort.parent)]
    width = layout.topology.node_sizes(block)[0]
    packs = []
    for parent in sorted({cohort.parent for cohort in cohorts}, key=lambda b: (-b.width, b.first)):
        mine = [cohort for cohort in cohorts if cohort.parent == parent]
        homes = np.concatenate([_homes(layout, cohort, width) for cohort in mine])
        lengths = np.concatenate([layout.columns["length"][cohort.first : cohort.end] for cohort in mine])
        first = (parent.first - block.first) // width
        packs.append(Pack(first, parent.width // width, lengths.tobytes(), homes.tobytes()))
    node, share = divmod(rank - block.first, width)
    placements = np.concatenate([np.arange(cohort.first, cohort.end) for cohort in cohorts])
    return Spread(block, width, share, placements, schedule_of(Signature(tuple(packs), node, step_rows)))


def _homes(layout: Layout, cohort: Cohort, width: int) -> np.ndarray:
    """int64: node of the first token of each of the cohort's documents, counted from the parent's first node."""
    starts = layout.offsets[cohort.first : cohort.end] - layout.offsets[cohort.first]
    rank = cohort.child.first + np.searchsorted(cohort.cuts, starts, side="right") - 1
    return (rank - cohort.parent.first) // width
