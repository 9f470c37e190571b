"""The streams of the child blocks around a rank: what every layer reads in which tokens stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raypack.exchange.layout import Cohort, Layout
from raypack.plan.topology import Block


@dataclass(frozen=True)
class Stream:
    """One child block's stream: `starts` [documents + 1] and `edges` [width + 1] are offsets in it, ascending."""

    child: Block
    starts: np.ndarray
    edges: np.ndarray

    def held(self, low: int, high: int, ranks: range) -> tuple[int, ...]:
        """Rows of [low, high) on each of the block's ranks `ranks` (counted in the block)."""
        a, b = self.edges[ranks.start : ranks.stop], self.edges[ranks.start + 1 : ranks.stop + 1]
        return tuple(np.maximum(np.minimum(b, high) - np.maximum(a, low), 0).tolist())

    def holder(self, row: int) -> int:
        """The block's rank that holds a row."""
        return int(np.searchsorted(self.edges, row, side="right")) - 1

    def document(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, side="right")) - 1


def streams_around(layout: Layout, rank: int, keep: Callable[[Cohort], bool] = lambda _: True) -> list[Stream]:
    """Streams of the child blocks that hold `rank`, widest first: the order of its rows.

    Only cohorts that `keep` picks: what a rank then holds is still one interval of the stream.
    """
    of_child: dict[Block, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for cohort in layout.cohorts:
        if cohort.child.holds(rank) and keep(cohort):
            lengths, sizes = of_child.setdefault(cohort.child, ([], []))
            lengths.append(layout.columns["length"][cohort.first : cohort.end])
            sizes.append(np.diff(cohort.cuts))
    streams = []
    for child, (lengths, sizes) in sorted(of_child.items(), key=lambda item: -item[0].width):
        starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        edges = np.concatenate([[0], np.cumsum(np.sum(sizes, axis=0))])
        streams.append(Stream(child, starts, edges))
    return streams
