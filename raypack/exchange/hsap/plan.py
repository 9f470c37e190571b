"""The hsap call of a rank in a round: decided on the host from the layout alone.

A node's schedule as one of its ranks cohorts it: which rank sends which rows to whom at each tick.

Ranks with the same share of the heads on two nodes exchange keys and values. Where ranks outnumber KV heads, several
ranks of a node hold the same ones (*sharers*): then each carries only its part of a message across, and the sharers
pass their parts on inside the node, so that no key crosses nodes twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from raypack.exchange.heads.plan import Exchange, Heads
from raypack.exchange.hsap.schedule import Step, Work
from raypack.exchange.hsap.spread import Spread, build_spread
from raypack.exchange.hsap.transfers import STEP_ROWS, part
from raypack.exchange.layout import Layout, head_share
from raypack.kernels.packing import Span
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


@dataclass(frozen=True)
class HsapPlan:
    """One rank's hsap call.

    Attributes:
        routes: what crosses nodes, and when.
        local: each document's local rows over themselves. They are in order of position, so that "causal" among rows is
            causal in the document, whatever lies between two segments.
        kv_of_q: local KV head of each local query head.
    """

    routes: Routes
    local: tuple[Span, ...]
    kv_of_q: tuple[int, ...]


def plan_hsap(layout: Layout, rank: int, into: Exchange, step_rows: int = STEP_ROWS) -> HsapPlan | None:
    """The hsap call of `rank`, with at most `step_rows` rows a message; None where no spread sample is around it.

    Args:
        into: the exchange of Q, K and V that delivers the call.
    """
    spread = build_spread(layout, rank, step_rows)
    if spread is None:
        return None
    call = next(call for call in into.calls if call.spread)
    edges = (0, *accumulate(spread.schedule.lengths))
    local = tuple(Span(a, b, a, b, causal=True) for a, b in pairwise(edges) if b > a)
    kv_of_q = call.kv_of_q(into.heads.heads // into.heads.kv_heads)
    return HsapPlan(build_routes(spread, into.heads, into.block), local, kv_of_q)
