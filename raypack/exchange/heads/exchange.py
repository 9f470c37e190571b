"""From one layout to another: one all-to-all and the row moves around it (docs/exchange.md).

Everything here is decided on the host from a `Layout` (`build`); `rows` moves, `run` communicates. Units: a
*vector* is one head of one token, `head_dim` numbers. Token tensors are [rows, heads, head_dim] with the heads of a
token in the order Q, K, V; the *wire* is [vectors, head_dim], ordered (destination, placement, token, head).

Moves to heads bring tokens of the child layout to the head layout; those to tokens are the exact adjoint: rows back,
and the copies of a KV head summed in rank order, never below fp32.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from raypack.plan.heads import head_share
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
