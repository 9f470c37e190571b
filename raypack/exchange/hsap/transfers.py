"""All that crosses nodes for hsap attention, piece by piece, with the tick at which it does.

A node needs a remote segment exactly when it holds a later segment of the same document (segments of a document are
disjoint, so it then needs all of it, once, for the local rows behind it). The transfers are spread over *ticks*:
rotation 1, 2, ... (node i sends to node i + rotation and receives from node i - rotation), and in each rotation as many
ticks as its longest message needs at `step_rows` rows each. A tick has one number on all ranks, and all its sends and
receives are posted together, so no order of packs can deadlock; no node passes on what another one sent, so there is no
chain; and a rank never holds more than a few ticks' rows of others (`keys` says how many).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from raypack.exchange.hsap.segments import Segmentation, segment

STEP_ROWS = 8192
"""Most tokens of one message where nothing else is said."""


class Pack(NamedTuple):
    """The hsap documents of one parent: `lengths` and `homes` are int64 arrays as bytes (homes: see `segment`).

    `first` is the parent's first node, counted from that of the widest parent; `nodes` how many it has.
    """

    first: int
    nodes: int
    lengths: bytes
    homes: bytes


@dataclass(frozen=True)
class Transfers:
    """Every piece that crosses nodes, in wire order: int64 arrays [pieces]; `high` and `segment_high` differ where a
    message ends inside a segment."""

    source: np.ndarray
    target: np.ndarray
    document: np.ndarray
    low: np.ndarray
    high: np.ndarray
    segment_high: np.ndarray
    tick: np.ndarray
    ticks: int

    def select(self, mask: np.ndarray) -> Transfers:
        arrays = {name: column[mask] for name, column in vars(self).items() if name != "ticks"}
        return replace(self, **arrays)


@lru_cache(maxsize=128)
def transfers_of(packs: tuple[Pack, ...], step_rows: int) -> tuple[Segmentation, Transfers]:
    """The segments of the packs, and all that crosses nodes because of them."""
    segments = merge(
        (pack.first, segment(np.frombuffer(pack.lengths, np.int64), np.frombuffer(pack.homes, np.int64), pack.nodes))
        for pack in packs
    )
    return segments, transfers(segments, step_rows)


def merge(parts: Iterable[tuple[int, Segmentation]]) -> Segmentation:
    """Segmentations of parents inside the first one as one over its nodes; each comes with its parent's first node."""
    columns: list[tuple[np.ndarray, ...]] = []
    documents, nodes = 0, 0
    for first, each in parts:
        nodes = nodes or each.nodes
        columns.append((each.document + documents, each.low, each.high, each.node + first))
        documents += int(each.document[-1]) + 1
    document, low, high, node = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Segmentation(document, low, high, node, nodes)


def transfers(segments: Segmentation, step_rows: int = STEP_ROWS) -> Transfers:
    """All pieces of all messages of all nodes."""
    source, target, which = _needed(segments)
    rotation = (target - source) % segments.nodes
    order = np.lexsort((which, source, rotation))
    source, target, which, rotation = (x[order] for x in (source, target, which, rotation))
    size = segments.high[which] - segments.low[which]
    # A message stream is all that goes from one node to another; its rows are numbered from 0.
    stream = source * segments.nodes + rotation
    starts = np.flatnonzero(np.append(True, stream[1:] != stream[:-1])) if len(stream) else np.zeros(0, np.int64)
    end = np.cumsum(size)
    base = np.repeat((end - size)[starts], np.diff(np.append(starts, len(stream))))
    first, last = end - size - base, end - base
    # Cut at multiples of `step_rows`.
    parts = (last - 1) // step_rows - first // step_rows + 1
    piece = np.repeat(np.arange(len(parts)), parts)
    number = (first // step_rows)[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)
    low = np.maximum(first[piece], number * step_rows)
    high = np.minimum(last[piece], (number + 1) * step_rows)
    offset = segments.low[which][piece] - first[piece]
    messages = np.zeros(segments.nodes, dtype=np.int64)
    np.maximum.at(messages, rotation[piece], number + 1)
    tick = (np.cumsum(messages) - messages)[rotation[piece]] + number
    return Transfers(
        source[piece],
        target[piece],
        segments.document[which][piece],
        low + offset,
        high + offset,
        segments.high[which][piece],
        tick,
        ticks=int(messages.sum()),
    )


def _needed(segments: Segmentation) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(source node, target node, segment) of every segment that another node needs."""
    first = np.append(True, segments.document[1:] != segments.document[:-1])
    count = np.diff(np.append(np.flatnonzero(first), len(first)))
    shared = np.flatnonzero(np.repeat(count > 1, count))
    document, node = segments.document[shared], segments.node[shared]
    _, row = np.unique(document, return_inverse=True)
    # The start of the last segment of each document on each node: what lies before it is needed there.
    latest = np.full((int(row.max()) + 1 if len(row) else 0, segments.nodes), -1, dtype=np.int64)
    np.maximum.at(latest, (row, node), segments.low[shared])
    wanted = latest[row] >= segments.high[shared][:, None]
    wanted[np.arange(len(node)), node] = False
    which, target = np.nonzero(wanted)
    return node[which], target, shared[which]


def part(rows: int, sharers: int, index: int) -> tuple[int, int]:
    """Rows [first, end) of a message that one of several ranks with the same KV heads carries."""
    return rows * index // sharers, rows * (index + 1) // sharers
