"""The hsap part of a layout around one rank: which node and which head share it is, and whose tokens are where.

A run is *spread* where its attention is hsap and its parent spans nodes: heads are then split over the ranks of each
node and the segments of its documents over the nodes. (Inside one node hsap is nothing but the exchange of heads.)
Spread parents are nested or disjoint, and nodes inside the widest are of one size: a rank has one share of the heads,
and one schedule for all spread parents inside the widest around it, since ticks must have one number everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.exchange.hsap.schedule import Schedule, Signature, schedule_of
from raypack.exchange.hsap.transfers import STEP_ROWS, Pack
from raypack.exchange.layout import Layout, Run
from raypack.plan.topology import Block


def is_spread(layout: Layout, run: Run) -> bool:
    return run.attention == "hsap" and not layout.topology.in_one_node(run.parent)


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

    def parts(self, layout: Layout, run: Run, low: int, high: int) -> list[tuple[int, int, int]]:
        """(node, low, high) of the tokens [low, high) of a run's stream, in order, neighbours joined."""
        node, lows, highs = self._stream(layout, run)
        lows, highs = np.maximum(lows, low), np.minimum(highs, high)
        keep = highs > lows
        node, lows, highs = node[keep], lows[keep], highs[keep]
        if not len(node):
            return []
        new = np.flatnonzero(np.append(True, node[1:] != node[:-1]))
        last = np.append(new[1:], len(node)) - 1
        return list(zip(node[new].tolist(), lows[new].tolist(), highs[last].tolist(), strict=True))

    def _stream(self, layout: Layout, run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(node, low, high) of the segments of a run's documents, in the run's stream."""
        segments = self.schedule.segments
        a, b = np.searchsorted(segments.document, self._documents(run))
        start = layout.offsets[self.placements[segments.document[a:b]]] - layout.offsets[run.first]
        return segments.node[a:b], start + segments.low[a:b], start + segments.high[a:b]

    def lengths(self, run: Run) -> tuple[int, ...]:
        """Local tokens of each of the run's documents."""
        first, end = self._documents(run)
        return self.schedule.lengths[first:end]

    def bounds(self, layout: Layout, run: Run) -> tuple[int, ...]:
        """Local rows of the run before the shard of each rank of its child, and all of them."""
        node, low, high = self._stream(layout, run)
        low, high = low[node == self.schedule.node], high[node == self.schedule.node]
        before = np.concatenate(([0], np.cumsum(high - low)))
        cuts = np.array(run.cuts, dtype=np.int64)
        at = np.searchsorted(low, cuts, side="right")
        # Segments up to `at` start before the cut; only the last of them may go beyond it.
        beyond = np.maximum(np.append(0, high)[at] - cuts, 0)
        return tuple((before[at] - beyond).tolist())

    def _documents(self, run: Run) -> tuple[int, int]:
        first, end = np.searchsorted(self.placements, (run.first, run.end))
        return int(first), int(end)


def build_spread(layout: Layout, rank: int, step_rows: int = STEP_ROWS) -> Spread | None:
    """The hsap part of a layout around `rank`; None where there is none."""
    spread = [run for run in layout.runs if is_spread(layout, run)]
    around = [run.parent for run in spread if run.parent.holds(rank)]
    if not around:
        return None
    block = max(around, key=lambda b: b.width)
    runs = [run for run in spread if block.contains(run.parent)]
    width = layout.topology.node_sizes(block)[0]
    packs = []
    for parent in sorted({run.parent for run in runs}, key=lambda b: (-b.width, b.first)):
        mine = [run for run in runs if run.parent == parent]
        homes = np.concatenate([_homes(layout, run, width) for run in mine])
        lengths = np.concatenate([layout.columns["length"][run.first : run.end] for run in mine])
        first = (parent.first - block.first) // width
        packs.append(Pack(first, parent.width // width, lengths.tobytes(), homes.tobytes()))
    node, share = divmod(rank - block.first, width)
    placements = np.concatenate([np.arange(run.first, run.end) for run in runs])
    return Spread(block, width, share, placements, schedule_of(Signature(tuple(packs), node, step_rows)))


def _homes(layout: Layout, run: Run, width: int) -> np.ndarray:
    """int64: node of the first token of each of the run's documents, counted from the parent's first node."""
    starts = layout.offsets[run.first : run.end] - layout.offsets[run.first]
    rank = run.child.first + np.searchsorted(run.cuts, starts, side="right") - 1
    return (rank - run.parent.first) // width
