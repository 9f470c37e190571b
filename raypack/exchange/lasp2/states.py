"""LASP-2: states of linear attention that cross shard borders, decided on the host (docs/linear.md).

A child block's stream is cut into contiguous shards, so of the documents on a rank only the one at the end of a shard
can go on at the right, and only the one at its start can have come from the left. Around a rank there is at most one
child block of each width: a *slot*. One all-gather moves a state for each slot (`gather`).

Reset at document starts: the state that enters a shard is summed over exactly the ranks that hold the same document
before it, each scaled by the decay of the tokens in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raypack.exchange.layout import Layout, Segments
from raypack.exchange.streams import Stream, streams_around
from raypack.kernels.packing import Kept
from raypack.plan.topology import Block


@dataclass(frozen=True)
class Border:
    """What crosses one border of a shard: a document of which other ranks of the block hold a part.

    Attributes:
        section: index of this rank's rows of it in `StatePlan.sections`.
        position: index in the document of the first of these rows.
        ranks: ranks [first, end) that hold the rest of it on that side, counted from the component's first rank;
            ranks without rows of the block may be among them.
        rows: rows of the document on each of these ranks.
    """

    section: int
    position: int
    ranks: tuple[int, int]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """The child block of one width around this rank.

    Attributes:
        slot: its place in the gathered buffer.
        entering: the document that comes from the ranks on the left, if any.
        leaving: the document that goes on at the right, if any. It may be the same one: then the shard holds nothing
            else, and the state that leaves is what entered, decayed, plus its own.
    """

    slot: int
    entering: Border | None
    leaving: Border | None

    @property
    def passes(self) -> bool:
        """Whether the document that enters is the one that leaves."""
        return self.entering is not None and self.leaving is not None and self.entering.section == self.leaving.section


@dataclass(frozen=True)
class StatePlan:
    """One round's linear attention on one rank. Built by `plan_states` from the layout alone.

    Attributes:
        block: ranks of the connected component of children; its group carries the gather (width 1: no call).
        widths: child widths of two or more in the component, descending: the slots, the same on all of its ranks.
        pieces: rows of each part of a document on this rank, in row order.
        sections: the rows again, cut so that what crosses a border is a section of its own.
        links: the slots that this rank has a shard of.
    """

    block: Block
    widths: tuple[int, ...]
    pieces: np.ndarray
    sections: tuple[int, ...]
    links: tuple[Link, ...]
    kept: Kept = field(default_factory=Kept, repr=False, compare=False)


def plan_states(layout: Layout, rank: int, segments: Segments) -> StatePlan:
    """The states that `rank` sends and gets, and how its rows (`segments`) are cut for it."""
    block = layout.component(rank, full=False)
    widths = sorted(
        {cohort.child.width for cohort in layout.cohorts if block.contains(cohort.child)} - {1}, reverse=True
    )
    sections: list[int] = []
    links = []
    for stream in streams_around(layout, rank):
        link, sizes = _link(stream, rank, block, len(sections), widths)
        sections.extend(sizes)
        if link is not None:
            links.append(link)
    return StatePlan(block, tuple(widths), segments.lengths, tuple(sections), tuple(links))


def _link(
    stream: Stream, rank: int, block: Block, section: int, widths: list[int]
) -> tuple[Link | None, tuple[int, ...]]:
    """The link of one stream and the sizes of its sections, the first of which is number `section`."""
    child, i = stream.child, rank - stream.child.first
    low, high = int(stream.edges[i]), int(stream.edges[i + 1])
    if low == high:
        return None, ()
    first, last = stream.document(low), stream.document(high - 1)
    start, end = int(stream.starts[first]), int(stream.starts[last + 1])
    head = min(int(stream.starts[first + 1]), high) - low if start < low else 0
    tail = high - max(int(stream.starts[last]), low) if end > high else 0
    passes = head > 0 and tail > 0 and first == last
    parts = [head, 0, 0] if passes else [head, high - low - head - tail, tail]
    entering = leaving = None
    shift = child.first - block.first
    if head:
        before = range(stream.holder(start), i)
        held = stream.held(start, int(stream.starts[first + 1]), before)
        entering = Border(section, low - start, (before.start + shift, before.stop + shift), held)
    if tail:
        after = range(i + 1, stream.holder(end - 1) + 1)
        held = stream.held(int(stream.starts[last]), end, after)
        at = section if passes else section + sum(1 for part in parts[:2] if part)
        position = max(low - int(stream.starts[last]), 0)
        leaving = Border(at, position, (after.start + shift, after.stop + shift), held)
    link = Link(widths.index(child.width), entering, leaving) if child.width > 1 else None
    return link, tuple(part for part in parts if part)
