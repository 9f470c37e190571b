"""Which node of a parent attends for which tokens of its hsap documents: a pure function of the lengths
(docs/hsap.md).

A document stays whole where it fits, on its *home* (the node that holds its first token) before any other: then neither
its keys nor its queries cross nodes. Only what would overload a node is cut, in proportion to the room that is left:

- over two nodes at one place, the home first: late queries see more keys, so a given amount of work moves with the
  fewest tokens;
- over more nodes in *mirrored pairs* (zig-zag): node i gets tokens [a, b) and [n - b, n - a). Token t and its mirror
  see n + 1 keys together, so work and tokens are in proportion and no node sends or keeps much more than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import isqrt

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
