"""What one node does for hsap attention, tick by tick: compiled from the segments, cached by the problem's shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from raypack.exchange.hsap.transfers import Pack, Segmentation, Transfers, transfers_of


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


@lru_cache(maxsize=512)
def schedule_of(signature: Signature) -> Schedule:
    """The schedule of one node; a look-up where the shape has been seen before."""
    return compile_schedule(*transfers_of(signature.packs, signature.step_rows), signature.node)


def compile_schedule(segments: Segmentation, table: Transfers, node: int) -> Schedule:
    """The schedule of `node` for any segmentation.

    Args:
        segments: of all documents; a document may lie on any of the nodes, in any number of ranges.
        table: `transfers` of them.
    """
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
