"""Who gathers whose keys and values in a round: decided on the host from the layout alone (docs/linear.md, LASP-2H)."""

from __future__ import annotations

from dataclasses import dataclass

from raypack.exchange.layout import Cohort, Layout
from raypack.exchange.streams import Stream, streams_around
from raypack.plan.topology import Block


@dataclass(frozen=True)
class BlockGather:
    """The kv_gather documents of one block on this rank.

    Attributes:
        longest: rows of the block's longest shard: what every rank sends.
        rows: this rank's rows.
        remote: (rank in the block, first row, end) of the rows before this rank's that its first document needs.
        queries, keys: of each document on this rank, its rows here, and those up to the last one here.
    """

    block: Block
    longest: int
    rows: int
    remote: tuple[tuple[int, int, int], ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class GatherPlan:
    """One round's kv_gather documents around one rank.

    Attributes:
        sections: (rows, block index in `blocks` or -1 for rows that are exchanged by heads), in row order.
        blocks: widest first.
    """

    sections: tuple[tuple[int, int], ...]
    blocks: tuple[BlockGather, ...]


def gathers(cohort: Cohort) -> bool:
    """Whether a cohort's K and V are gathered; on one rank there is nothing to gather."""
    return cohort.attention == "kv_gather" and cohort.child.width > 1


def plan_gather(layout: Layout, rank: int) -> GatherPlan | None:
    """The gathers that `rank` takes part in; None where there is none."""
    streams = streams_around(layout, rank, gathers)
    if not streams:
        return None
    index = {stream.child: i for i, stream in enumerate(streams)}
    parts = []
    for cohort in layout.cohorts:
        if cohort.child.holds(rank):
            i = rank - cohort.child.first
            rows = cohort.cuts[i + 1] - cohort.cuts[i]
            parts.append((cohort.rows[i], rows, index[cohort.child] if gathers(cohort) else -1))
    sections: list[tuple[int, int]] = []
    for _, rows, where in sorted(part for part in parts if part[1]):
        before = sections.pop()[0] if sections and sections[-1][1] == where else 0
        sections.append((before + rows, where))
    return GatherPlan(tuple(sections), tuple(_block_gather(stream, rank) for stream in streams))


def _block_gather(stream: Stream, rank: int) -> BlockGather:
    i = rank - stream.child.first
    low, high = int(stream.edges[i]), int(stream.edges[i + 1])
    counts = stream.edges[1:] - stream.edges[:-1]
    first, last = stream.document(low), stream.document(max(high - 1, low))
    edges = stream.starts[first : last + 2].clip(low, high)
    queries = (edges[1:] - edges[:-1]).tolist() if high > low else []
    remote = []
    start = int(stream.starts[first])
    if high > low and start < low:
        for source in range(stream.holder(start), i):
            at = int(stream.edges[source])
            begin, end = max(start, at) - at, int(stream.edges[source + 1]) - at
            if begin < end:
                remote.append((source, begin, end))
    before = sum(end - begin for _, begin, end in remote)
    keys = [n + before if d == 0 else n for d, n in enumerate(queries)]
    return BlockGather(stream.child, int(counts.max()), high - low, tuple(remote), tuple(queries), tuple(keys))
