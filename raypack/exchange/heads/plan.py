"""Attention by heads (Ulysses) in a round: a rank's two exchanges, and what its attention calls look like.

From one layout to another: one all-to-all and the row moves around it (docs/exchange.md). Everything here is decided on
the host from a `Layout`; `run` moves and communicates. Units: a *vector* is one head of one token, `head_dim` numbers.
Token tensors are [rows, heads, head_dim] with the heads of a token in the order Q, K, V; the *wire* is [vectors,
head_dim], ordered (destination, placement, token, head).

A sample travels where its heads' block is more than one rank; one that is spread over nodes goes to the node that
attends for the token, and there by heads to the node's ranks. The way back is the exact adjoint: rows back, and the
copies of a KV head summed in rank order, never below fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from raypack.config import ModelConfig
from raypack.exchange.hsap.spread import Spread, build_spread, is_spread
from raypack.exchange.layout import Cohort, Layout, head_share
from raypack.kernels.packing import Packing
from raypack.plan.topology import Block


@dataclass(frozen=True)
class Heads:
    """Which heads of a token travel: all of Q, K and V (`kv_heads` > 0), or the query heads of an output (0)."""

    heads: int
    kv_heads: int
    kv_travels: bool = True

    @property
    def per_token(self) -> int:
        """Vectors of one token."""
        return self.heads + (2 * self.kv_heads if self.kv_travels else 0)

    def ranges(self, width: int, index: int) -> tuple[tuple[int, int], ...]:
        """Vector ranges inside a token that rank `index` of a block of `width` gets: Q, then K, then V."""
        q0, q1, k0, k1 = head_share(self.heads, self.kv_heads, width)[index]
        if not self.kv_travels:
            return ((q0, q1),)
        base = self.heads, self.heads + self.kv_heads
        return ((q0, q1), (base[0] + k0, base[0] + k1), (base[1] + k0, base[1] + k1))

    def share(self, width: int, index: int) -> int:
        """Vectors of one token that this rank gets."""
        return sum(hi - lo for lo, hi in self.ranges(width, index))

    def copied(self, width: int) -> bool:
        """Whether some KV head goes to more than one rank of a block of `width`."""
        shares = head_share(self.heads, self.kv_heads, width)
        return self.kv_travels and sum(k1 - k0 for _, _, k0, k1 in shares) > self.kv_heads


@dataclass(frozen=True)
class Move:
    """`count` strided copies of [rows, heads] vectors between a token tensor and the wire.

    Copy i starts at vector `token_at + i * token_step` of the token tensor (rows apart by its heads per token) and at
    `wire_at + i * wire_step` of the wire (rows apart by `wire_row`).
    """

    count: int
    rows: int
    heads: int
    token_at: int
    token_step: int
    wire_at: int
    wire_step: int
    wire_row: int
    is_kv: bool


@dataclass(frozen=True)
class Piece:
    """Rows of one call that are contiguous on the wire: `rows` rows from `row` on, at vector `wire_at`."""

    call: int
    row: int
    rows: int
    wire_at: int


@dataclass(frozen=True)
class Call:
    """One attention call of this rank: all tokens of the samples of `block`, this rank's share of the heads.

    Attributes:
        lengths: documents, in row order.
        spread: hsap over nodes: heads are split over this rank's node alone, whose tokens of each document `lengths`
            counts.
        heads: (first query head, end, first KV head, end), in the whole model's numbering.
        vectors: per token (Q + K + V, or Q alone).
    """

    block: Block
    lengths: tuple[int, ...]
    heads: tuple[int, int, int, int]
    vectors: int
    spread: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def kv_of_q(self, per_kv: int) -> tuple[int, ...]:
        """Local KV head of each local query head, `per_kv` query heads to a KV head."""
        q0, q1, k0, _ = self.heads
        return tuple(q // per_kv - k0 for q in range(q0, q1))


@dataclass(frozen=True)
class Exchange:
    """The move of one rank between its child layout and a head layout. Built by `build_exchange`.

    Attributes:
        block: ranks of the connected component; its group carries the all-to-all (width 1: no call).
        send, receive: vectors to and from every rank of `block`, in the direction tokens -> heads.
        moves: token tensor <-> wire.
        pieces: wire <-> calls, in wire order; `gather` lists the same in the calls' row order.
        local: rows [first, end) of samples whose block is this rank alone, as (call index, first, end); they never
            travel.
        copied: some KV head arrives from several ranks in the adjoint.
    """

    heads: Heads
    rank: int
    rows: int
    block: Block
    send: tuple[int, ...]
    receive: tuple[int, ...]
    moves: tuple[Move, ...]
    pieces: tuple[Piece, ...]
    gather: tuple[Piece, ...]
    calls: tuple[Call, ...]
    local: tuple[int, int, int] | None
    copied: bool

    @cached_property
    def keeps_received(self) -> bool:
        """Whether some call is a view of the received wire, which then must not be used again."""
        parts = Counter(piece.call for piece in self.gather if self.calls[piece.call].vectors)
        return 1 in parts.values()


def build_exchange(layout: Layout, rank: int, heads: Heads, *, full: bool) -> Exchange:
    """The exchange of `rank` between its tokens and the heads of full (`full`) or sparse layers."""
    block = layout.component(rank, full)
    cohorts = [cohort for cohort in layout.cohorts if cohort.block(full).overlaps(block)]
    spread = build_spread(layout, rank) if full and "hsap" in layout.attentions else None
    travelling = [cohort for cohort in cohorts if cohort.block(full).width > 1]
    going = [
        part for cohort in travelling if cohort.child.holds(rank) for part in _going(layout, cohort, rank, full, spread)
    ]
    held = [_held(layout, cohort, full, spread) for cohort in travelling if cohort.block(full).holds(rank)]
    moves, send = _token_side(going, block, heads)
    calls, pieces, receive = _head_side(layout, held, rank, block, heads, spread)
    alone = [cohort for cohort in cohorts if cohort.block(full) == Block(rank, 1)]
    local = None
    if alone:
        lengths = tuple(n for cohort in alone for n in layout.lengths(cohort))
        first = min(cohort.rows[0] for cohort in alone)
        local = (len(calls), first, first + sum(lengths))
        calls.append(Call(Block(rank, 1), lengths, (0, heads.heads, 0, heads.kv_heads), heads.per_token))
    return Exchange(
        heads=heads,
        rank=rank,
        rows=layout.rows(rank),
        block=block,
        send=tuple(send),
        receive=tuple(receive),
        moves=_join(moves),
        pieces=_merge(pieces, calls),
        gather=_merge(sorted(pieces, key=lambda p: (p.call, p.row)), calls),
        calls=tuple(calls),
        local=local,
        copied=any(heads.copied(part.ranks.width) for part in going),
    )


@dataclass(frozen=True)
class _Going:
    """Rows [row, row + rows) of this rank go to `ranks`, over which their heads are split."""

    row: int
    rows: int
    ranks: Block


@dataclass(frozen=True)
class _Held:
    """A cohort whose heads this rank holds: rows [bounds[i], bounds[i + 1]) of the call are from its child's rank i."""

    cohort: Cohort
    block: Block
    spread: bool
    bounds: tuple[int, ...]


def _going(layout: Layout, cohort: Cohort, rank: int, full: bool, spread: Spread | None) -> list[_Going]:
    """Where the rows of a cohort that this rank holds go, in row order."""
    i = rank - cohort.child.first
    row, low, high = cohort.rows[i], cohort.cuts[i], cohort.cuts[i + 1]
    if spread is not None and is_spread(layout, cohort):
        parts = spread.parts(layout, cohort, low, high)
        return [_Going(row + a - low, b - a, spread.node_block(node)) for node, a, b in parts]
    return [_Going(row, high - low, cohort.block(full))] if high > low else []


def _held(layout: Layout, cohort: Cohort, full: bool, spread: Spread | None) -> _Held:
    """`bounds` count from the cohort's own first row; `_head_side` knows what stands before it."""
    if spread is not None and is_spread(layout, cohort):
        return _Held(cohort, spread.block, True, spread.bounds(layout, cohort))
    return _Held(cohort, cohort.block(full), False, cohort.cuts)


def _token_side(going: Sequence[_Going], block: Block, heads: Heads) -> tuple[list[tuple[int, int, Move]], list[int]]:
    """What this rank's tokens send to every destination; each move with its sort key (section, rows)."""
    moves, send, at = [], [], 0
    for destination in range(block.first, block.end):
        before = at
        for number, part in enumerate(going):
            if not part.ranks.holds(destination):
                continue
            ranges = heads.ranges(part.ranks.width, destination - part.ranks.first)
            width, inside = sum(hi - lo for lo, hi in ranges), 0
            for section, (lo, hi) in enumerate(ranges):
                if hi > lo:
                    start = part.row * heads.per_token + lo
                    moves.append(
                        (section, number, Move(1, part.rows, hi - lo, start, 0, at + inside, 0, width, section > 0))
                    )
                    inside += hi - lo
            at += part.rows * width
        send.append(at - before)
    return moves, send


def _head_side(
    layout: Layout, held: Sequence[_Held], rank: int, block: Block, heads: Heads, spread: Spread | None
) -> tuple[list[Call], list[Piece], list[int]]:
    """What this rank's heads receive from every source: attention calls, and where their rows lie on the wire."""
    owners = sorted({(each.block, each.spread) for each in held}, key=lambda owner: (-owner[0].width, owner[1]))
    calls, starts = [], {}
    for owner in owners:
        lengths: list[int] = []
        for each in held:
            if (each.block, each.spread) == owner:
                starts[each.cohort.first] = sum(lengths)
                lengths.extend(
                    spread.lengths(each.cohort) if spread is not None and each.spread else layout.lengths(each.cohort)
                )
        split = spread.node_block(spread.node_of(rank)) if spread is not None and owner[1] else owner[0]
        index = rank - split.first
        share = head_share(heads.heads, heads.kv_heads, split.width)[index]
        calls.append(Call(owner[0], tuple(lengths), share, heads.share(split.width, index), owner[1]))
    pieces, receive, at = [], [], 0
    for source in range(block.first, block.end):
        before = at
        for each in held:
            if not each.cohort.child.holds(source):
                continue
            i = source - each.cohort.child.first
            rows = each.bounds[i + 1] - each.bounds[i]
            if rows:
                call = owners.index((each.block, each.spread))
                pieces.append(Piece(call, starts[each.cohort.first] + each.bounds[i], rows, at))
                at += rows * calls[call].vectors
        receive.append(at - before)
    return calls, pieces, receive


def _join(moves: list[tuple[int, int, Move]]) -> tuple[Move, ...]:
    """Join copies that differ by constant steps (regular shares over neighbouring destinations) into one."""
    out: list[Move] = []
    last: tuple[int, int] | None = None
    for section, number, move in sorted(moves, key=lambda m: m[:2]):
        if out and last == (section, number):
            head = out[-1]
            same = (head.rows, head.heads, head.wire_row) == (move.rows, move.heads, move.wire_row)
            steps = (move.token_at - head.token_at, move.wire_at - head.wire_at)
            expected = (head.count * head.token_step, head.count * head.wire_step)
            if same and (head.count == 1 or steps == expected):
                step = steps if head.count == 1 else (head.token_step, head.wire_step)
                out[-1] = Move(
                    head.count + 1, head.rows, head.heads, head.token_at, step[0],
                    head.wire_at, step[1], head.wire_row, head.is_kv,
                )  # fmt: skip
                continue
        out.append(move)
        last = (section, number)
    return tuple(out)


def _merge(pieces: Sequence[Piece], calls: Sequence[Call]) -> tuple[Piece, ...]:
    """Merge neighbours that are contiguous both in the call and on the wire."""
    out: list[Piece] = []
    for piece in pieces:
        if out:
            head = out[-1]
            contiguous = head.row + head.rows == piece.row
            if (
                head.call == piece.call
                and contiguous
                and head.wire_at + head.rows * calls[head.call].vectors == piece.wire_at
            ):
                out[-1] = Piece(head.call, head.row, head.rows + piece.rows, head.wire_at)
                continue
        out.append(piece)
    return tuple(out)


@dataclass(frozen=True)
class ByHeads:
    """One rank's part.

    Attributes:
        into: tokens -> heads, Q, K and V in one call.
        out: heads -> tokens (cohort in the `to_tokens` direction), query heads only.
        packings: documents of each call.
        kv_of_q: local KV head of each local query head, for each call.
    """

    into: Exchange
    out: Exchange
    packings: tuple[Packing, ...]
    kv_of_q: tuple[tuple[int, ...], ...]


def plan_heads(layout: Layout, rank: int, model: ModelConfig, *, full: bool) -> ByHeads:
    """Over the samples' parents (`full`) or their children."""
    into = build_exchange(layout, rank, Heads(model.heads, model.kv_heads), full=full)
    per_kv = model.heads // model.kv_heads
    return ByHeads(
        into=into,
        out=build_exchange(layout, rank, Heads(model.heads, model.kv_heads, kv_travels=False), full=full),
        packings=tuple(Packing(call.lengths) for call in into.calls),
        kv_of_q=tuple(call.kv_of_q(per_kv) for call in into.calls),
    )
