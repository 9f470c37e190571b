"""Which keys and values cross nodes for hsap attention, and when: compiled on the host from the segments alone.

A node needs a remote segment exactly when it holds a later segment of the same document (segments of a document are
disjoint, so it then needs all of it, once, for the local rows behind it). The transfers are spread over *ticks*:
rotation 1, 2, ... (node i sends to node i + rotation and receives from node i - rotation), and in each rotation as many
ticks as its longest message needs at `step_rows` rows each. A tick has one number on all ranks, and all its sends and
receives are posted together, so no order of packs can deadlock; no node passes on what another one sent, so there is no
chain; and a rank never holds more than a few ticks' rows of others (`kv_exchange` says how many).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from raypack.parallel.segments import Segmentation, segment

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


class Signature(NamedTuple):
    """The shape of a problem, whatever the samples are: what schedules are cached by.

    `packs` are a parent and those inside it, in canonical order; `node` counts from the first node of the first.
    """

    packs: tuple[Pack, ...]
    node: int
    step_rows: int


class Piece(NamedTuple):
    """Tokens [low, high) of a document (index among all documents of the packs)."""

    document: int
    low: int
    high: int


class Work(NamedTuple):
    """Local rows [query, query_end) attend to all of the arrived rows [key, key_end) of a step."""

    query: int
    query_end: int
    key: int
    key_end: int


@dataclass(frozen=True)
class Message:
    """Keys and values of some tokens on their way to or from `node`."""

    node: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return sum(p.high - p.low for p in self.pieces)


@dataclass(frozen=True)
class Step:
    """What a node sends, receives and computes at one tick.

    Attributes:
        tick: the same number on both sides of every message.
        send_rows: local row ranges [first, end) of the sent message, in its order.
        work: attention over the received rows.
    """

    tick: int
    send: Message | None
    receive: Message | None
    send_rows: tuple[tuple[int, int], ...]
    work: tuple[Work, ...]


@dataclass(frozen=True)
class Schedule:
    """All that one node does beyond attending to its own segments.

    Attributes:
        segments: of every document, on every node.
        lengths: tokens of each document on this node; 0 where it has none. Its local rows are these tokens in order.
        ticks: of all nodes together.
        steps: those of this node in which anything happens, by tick.
    """

    node: int
    segments: Segmentation
    lengths: tuple[int, ...]
    ticks: int
    steps: tuple[Step, ...]

    @property
    def rows(self) -> int:
        """Local rows."""
        return sum(self.lengths)


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


@lru_cache(maxsize=512)
def schedule_of(signature: Signature) -> Schedule:
    """The schedule of one node; a look-up where the shape has been seen before."""
    return _schedule(*transfers_of(signature.packs, signature.step_rows), signature.node)


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


def compile_schedule(segments: Segmentation, node: int, step_rows: int = STEP_ROWS) -> Schedule:
    """The schedule of `node` for any segmentation.

    Args:
        segments: of all documents; a document may lie on any of the nodes, in any number of ranges.
        step_rows: most rows of one message, at least 1.
    """
    return _schedule(segments, transfers(segments, step_rows), node)


def _schedule(segments: Segmentation, table: Transfers, node: int) -> Schedule:
    local = np.flatnonzero(segments.node == node)
    documents = int(segments.document[-1]) + 1
    sizes = segments.high[local] - segments.low[local]
    lengths = np.bincount(segments.document[local], sizes, documents).astype(np.int64)
    sent, received = table.select(table.source == node), table.select(table.target == node)
    sends = _messages(sent, sent.target)
    receives = _messages(received, received.source)
    send_rows = _local_rows(segments, local, sent)
    work = _work(segments, local, lengths, received)
    steps = tuple(
        Step(tick, sends.get(tick), receives.get(tick), send_rows.get(tick, ()), work.get(tick, ()))
        for tick in sorted({*sends, *receives})
    )
    return Schedule(node, segments, tuple(lengths.tolist()), table.ticks, steps)


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


def _messages(table: Transfers, other: np.ndarray) -> dict[int, Message]:
    """One message a tick, in wire order."""
    out: dict[int, tuple[int, list[Piece]]] = {}
    columns = (table.tick, other, table.document, table.low, table.high)
    for tick, node, document, low, high in zip(*(c.tolist() for c in columns), strict=True):
        out.setdefault(tick, (node, []))[1].append(Piece(document, low, high))
    return {tick: Message(node, tuple(pieces)) for tick, (node, pieces) in out.items()}


def _local_rows(segments: Segmentation, local: np.ndarray, sent: Transfers) -> dict[int, tuple[tuple[int, int], ...]]:
    """Local row ranges of what is sent at each tick, neighbours joined."""
    row_of = _RowsOf(segments, local)
    first = row_of(sent.document, sent.low)
    end = first + sent.high - sent.low
    out: dict[int, list[tuple[int, int]]] = {}
    for tick, a, b in zip(sent.tick.tolist(), first.tolist(), end.tolist(), strict=True):
        ranges = out.setdefault(tick, [])
        joins = bool(ranges) and ranges[-1][1] == a
        ranges.append((ranges.pop()[0] if joins else a, b))
    return {tick: tuple(ranges) for tick, ranges in out.items()}


def _work(
    segments: Segmentation, local: np.ndarray, lengths: np.ndarray, received: Transfers
) -> dict[int, tuple[Work, ...]]:
    """Which local rows attend to what arrives at each tick, neighbouring keys of the same queries joined."""
    query = _RowsOf(segments, local)(received.document, received.segment_high)
    query_end = np.cumsum(lengths)[received.document]
    out: dict[int, list[Work]] = {}
    columns = (received.tick, query, query_end, received.high - received.low)
    for tick, first, end, rows in zip(*(c.tolist() for c in columns), strict=True):
        made = out.setdefault(tick, [])
        key = made[-1].key_end if made else 0
        last_key = key
        if made and made[-1][:2] == (first, end):
            last_key = made.pop().key
        made.append(Work(first, end, last_key, key + rows))
    return {tick: tuple(made) for tick, made in out.items()}


class _RowsOf:
    """Local row of a position in a document: that of the first local token at it or after it, inside the document."""

    def __init__(self, segments: Segmentation, local: np.ndarray) -> None:
        self.stride = int(segments.high.max()) + 1
        self.low, self.high = segments.low[local], segments.high[local]
        self.end = segments.document[local] * self.stride + self.high
        sizes = self.high - self.low
        self.row = np.cumsum(sizes) - sizes

    def __call__(self, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.end, document * self.stride + position, side="right")
        return self.row[at] + np.maximum(position - self.low[at], 0)


def part(rows: int, sharers: int, index: int) -> tuple[int, int]:
    """Rows [first, end) of a message that one of several ranks with the same KV heads carries."""
    return rows * index // sharers, rows * (index + 1) // sharers
