"""A node's schedule as one of its ranks runs it: which rank sends which rows to whom at each tick.

Ranks with the same share of the heads on two nodes exchange keys and values. Where ranks outnumber KV heads, several
ranks of a node hold the same ones (*sharers*): then each carries only its part of a message across, and the sharers
pass their parts on inside the node, so that no key crosses nodes twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from raypack.exchange.heads.plan import Heads
from raypack.exchange.hsap.schedule import Step, Work
from raypack.exchange.hsap.spread import Spread
from raypack.exchange.hsap.transfers import part
from raypack.exchange.layout import head_share
from raypack.plan.topology import Block


@dataclass(frozen=True)
class Leg:
    """One tick on one rank.

    Attributes:
        rows: that the node receives, and this rank attends to, in this tick.
        target: rank that gets rows `send` (local row ranges), if any.
        source: rank from which rows `parts[index]` of the received ones come, if any.
        parts: rows [first, end) of the received ones that each sharer carries.
    """

    tick: int
    rows: int
    target: int | None
    send: tuple[tuple[int, int], ...]
    source: int | None
    parts: tuple[tuple[int, int], ...]
    work: tuple[Work, ...]

    @property
    def sent(self) -> int:
        """Rows that this rank sends across nodes."""
        return sum(b - a for a, b in self.send)


@dataclass(frozen=True)
class Routes:
    """All ticks of one rank.

    Attributes:
        block: its group carries the messages.
        sharers: ranks of this node with the same KV heads, this one among them at `index`.
        vectors: K and V heads of this rank.
        ticks: of all ranks of the spread block together; 0 where this rank holds no heads.
    """

    block: Block
    sharers: tuple[int, ...]
    index: int
    vectors: int
    ticks: int
    legs: tuple[Leg, ...]

    @cached_property
    def by_tick(self) -> dict[int, Leg]:
        return {leg.tick: leg for leg in self.legs}


def build_routes(spread: Spread, heads: Heads, block: Block) -> Routes:
    """The routes of the spread's rank; `block` is the component that it exchanges on."""
    shares = head_share(heads.heads, heads.kv_heads, spread.width)
    _, _, first, end = shares[spread.share]
    mine = [i for i, share in enumerate(shares) if share[2:] == (first, end)]
    node = spread.node_block(spread.schedule.node)
    sharers, index = tuple(node.first + i for i in mine), mine.index(spread.share)
    if end == first:
        return Routes(block, sharers, index, 0, 0, ())
    legs = tuple(_leg(step, spread, len(sharers), index) for step in spread.schedule.steps)
    return Routes(block, sharers, index, 2 * (end - first), spread.schedule.ticks, legs)


def _leg(step: Step, spread: Spread, sharers: int, index: int) -> Leg:
    rows = step.receive.rows if step.receive else 0
    sent = step.send.rows if step.send else 0
    parts = tuple(part(rows, sharers, i) for i in range(sharers))
    send = _cut(step.send_rows, *part(sent, sharers, index))
    return Leg(
        step.tick,
        rows,
        spread.rank_at(step.send.node) if step.send and send else None,
        send,
        spread.rank_at(step.receive.node) if step.receive and parts[index][1] > parts[index][0] else None,
        parts,
        step.work,
    )


def _cut(ranges: tuple[tuple[int, int], ...], first: int, end: int) -> tuple[tuple[int, int], ...]:
    """The part [first, end) of the concatenation of `ranges`."""
    out, at = [], 0
    for a, b in ranges:
        low, high = max(first - at, 0), min(end - at, b - a)
        if low < high:
            out.append((a + low, a + high))
        at += b - a
    return tuple(out)
