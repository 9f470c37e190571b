"""Segments and transfers of hsap: which node attends for which tokens, and what then crosses nodes (docs/hsap.md).

**Segments.** A pure function of the lengths. A document stays whole where it fits, on its *home* (the node that holds
its first token) before any other: then neither its keys nor its queries cross nodes. Only what would overload a node
is cut, in proportion to the room that is left:

- over two nodes at one place, the home first: late queries see more keys, so a given amount of work moves with the
  fewest tokens;
- over more nodes in *mirrored pairs* (zig-zag): node i gets tokens [a, b) and [n - b, n - a). Token t and its mirror
  see n + 1 keys together, so work and tokens are in proportion and no node sends or keeps much more than another.

**Transfers.** All that crosses nodes, piece by piece, with the tick at which it does. A node needs a remote segment
exactly when it holds a later segment of the same document (segments of a document are disjoint, so it then needs all
of it, once, for the local rows behind it). The transfers are spread over *ticks*: rotation 1, 2, ... (node i sends to
node i + rotation and receives from node i - rotation), and in each rotation as many ticks as its longest message
needs at `step_rows` rows each. A tick has one number on all ranks, and all its sends and receives are posted
together, so no order of packs can deadlock; no node passes on what another one sent, so there is no chain; and a rank
never holds more than a few ticks' rows of others (`keys` says how many).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import isqrt
from typing import NamedTuple

import numpy as np

SLACK = 64
"""A node may exceed its even share of the work by 1 / SLACK of it before a document is cut."""


@dataclass(frozen=True)
class Segmentation:
    """Token ranges [low, high) of documents and the node of each: int64 arrays, ordered by (document, low).

    The ranges of a document are disjoint, not empty and cover it. `nodes` is the number of nodes of the parent.
    """

    document: np.ndarray
    low: np.ndarray
    high: np.ndarray
    node: np.ndarray
    nodes: int


def causal_work(length: int) -> int:
    """Query-key pairs of a document."""
    return length * (length + 1) // 2


def segment(lengths: Sequence[int] | np.ndarray, homes: Sequence[int] | np.ndarray, nodes: int) -> Segmentation:
    """Divide documents among nodes so that every node has about the same number of causal query-key pairs.

    Args:
        lengths: tokens of each document, at least 1.
        homes: node of each document's first token in the child layout.
        nodes: of the parent.

    Longest documents first (ties: in their order), each to its home or else to the node with most room; a document
    that fits nowhere is cut over as few nodes as have the room.
    """
    sizes, at_home = np.asarray(lengths, dtype=np.int64).tolist(), np.asarray(homes, dtype=np.int64).tolist()
    work = [causal_work(n) for n in sizes]
    rooms = _Rooms(-(-sum(work) // nodes), nodes)
    rows: list[tuple[int, int, int, int]] = []
    for document in np.argsort(-np.array(sizes, dtype=np.int64), kind="stable").tolist():
        size, need, home = sizes[document], work[document], at_home[document]
        node = home if rooms.fits(home, need) else rooms.largest()
        if rooms.fits(node, need):
            rooms.take(node, need)
            rows.append((document, 0, size, node))
            continue
        shares = _shares(need, home, rooms)
        for node, share in shares:
            rooms.take(node, share)
        rows += [(document, *part) for part in _cut(size, shares)]
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
    each, low, high, node_of = np.ascontiguousarray(table.T)
    return Segmentation(each, low, high, node_of, nodes)


class _Rooms:
    """Work that each node may still take."""

    def __init__(self, room: int, nodes: int) -> None:
        self.left = [room] * nodes
        self.slack = room // SLACK
        self._heap = [(-room, node) for node in range(nodes)]

    def fits(self, node: int, work: int) -> bool:
        return self.left[node] + self.slack >= work

    def take(self, node: int, work: int) -> None:
        self.left[node] -= work
        heappush(self._heap, (-self.left[node], node))

    def largest(self) -> int:
        """The node with most room, the first of equals."""
        while -self._heap[0][0] != self.left[self._heap[0][1]]:
            heappop(self._heap)
        return self._heap[0][1]


def _shares(need: int, home: int, rooms: _Rooms) -> list[tuple[int, int]]:
    """(node, work) of a document over the fewest nodes with room, home first, then most room first."""
    left = rooms.left
    order = sorted(range(len(left)), key=lambda i: (i != home, -left[i], i))
    shares: list[tuple[int, int]] = []
    for node in order:
        if need <= 0:
            break
        if left[node] > rooms.slack:
            shares.append((node, min(left[node], need)))
            need -= shares[-1][1]
    if not shares:
        return [(order[0], need)]
    # What is left is less than the slack of the nodes passed over.
    node, share = shares[-1]
    shares[-1] = (node, share + need)
    return shares


def _cut(size: int, shares: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Token ranges (low, high, node) of a document of `size` tokens for these shares of its work."""
    if len(shares) == 2:
        (first, share), (second, _) = shares
        # The largest t with t (t + 1) / 2 <= share.
        at = (isqrt(8 * share + 1) - 1) // 2
        parts = [(0, at, first), (at, size, second)]
    else:
        total, before, edge, parts = sum(share for _, share in shares), 0, 0, []
        for node, share in shares[:-1]:
            before += share
            following = size * before // (2 * total)
            parts += [(edge, following, node), (size - following, size - edge, node)]
            edge = following
        parts.append((edge, size - edge, shares[-1][0]))
    return [part for part in parts if part[1] > part[0]]


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
