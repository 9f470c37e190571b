"""From one layout to another: one all-to-all and the row moves around it (docs/exchange.md).

Everything here is decided on the host from a `Layout` (`exchange_build`); nothing communicates (`wire` does). Units: a
*vector* is one head of one token, `head_dim` numbers. Token tensors are [rows, heads, head_dim] with the heads of a
token in the order Q, K, V; the *wire* is [vectors, head_dim], ordered (destination, placement, token, head).

`to_heads` moves (pack, all-to-all, unpack) bring tokens of the child layout to the head layout; `to_tokens` is the
exact adjoint: rows back, and the copies of a KV head summed in rank order, never below fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

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

    # -- tokens -> heads ----------------------------------------------------------------------------------------

    @cached_property
    def keeps_received(self) -> bool:
        """Whether some call is a view of the received wire, which then must not be used again."""
        parts = Counter(piece.call for piece in self.gather if self.calls[piece.call].vectors)
        return 1 in parts.values()

    def pack(self, x: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Token tensor [rows, heads, head_dim] -> wire [sum(send), head_dim], in `buffer` where one is given."""
        x = x.contiguous()
        wire = x.new_empty(sum(self.send), x.shape[-1]) if buffer is None else buffer
        for move in self.moves:
            _on_wire(move, wire).copy_(_on_tokens(move, x))
        return wire

    def unpack(self, wire: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        """Received wire [sum(receive), head_dim] (and the local rows of `x`) -> one [tokens, vectors, D] a call."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.calls]
        for piece in self.gather:
            # A call without heads must be no view either: the wire's buffer may be used again before its backward.
            if vectors := self.calls[piece.call].vectors:
                rows = wire[piece.wire_at : piece.wire_at + piece.rows * vectors]
                parts[piece.call].append(rows.view(piece.rows, vectors, -1))
        out = []
        for call, part in zip(self.calls, parts, strict=True):
            if part:
                out.append(part[0] if len(part) == 1 else torch.cat(part))
            else:
                out.append(x.new_empty(call.tokens, call.vectors, x.shape[-1]))
        if self.local is not None:
            index, first, end = self.local
            out[index] = x[first:end]
        return out

    # -- heads -> tokens ----------------------------------------------------------------------------------------

    def pack_calls(
        self, calls: Sequence[torch.Tensor], like: torch.Tensor, buffer: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call tensors -> wire [sum(receive), head_dim]: what `unpack` received, sent back.

        No copy where one call's rows are the wire's already; else in `buffer` where one is given.
        """
        parts = [calls[p.call][p.row : p.row + p.rows] for p in self.pieces if self.calls[p.call].vectors]
        if not parts:
            return like.new_empty(0, like.shape[-1])
        flat = [part.reshape(-1, part.shape[-1]) for part in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat, out=buffer)

    def unpack_tokens(self, wire: torch.Tensor, calls: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Returned wire [sum(send), head_dim] -> token tensor; copies of a KV head are summed in rank order."""
        x = like.new_empty(self.rows, self.heads.per_token, like.shape[-1])
        total = None
        if self.copied:
            kv = 2 * self.heads.kv_heads
            wide = torch.promote_types(x.dtype, torch.float32)
            total = torch.zeros(self.rows, kv, x.shape[-1], dtype=wide, device=x.device)
        for move in self.moves:
            received = _on_wire(move, wire)
            if total is not None and move.is_kv:
                _add(move, received, total, self.heads)
            else:
                _on_tokens(move, x).copy_(received)
        if total is not None:
            x[:, self.heads.heads :] = total
        if self.local is not None:
            index, first, end = self.local
            x[first:end] = calls[index]
        return x


def _on_tokens(move: Move, x: torch.Tensor) -> torch.Tensor:
    """The view [count, rows, heads, D] of a contiguous token tensor that `move` names."""
    _, per_token, dim = x.shape
    stride = (move.token_step * dim, per_token * dim, dim, 1)
    return x.as_strided((move.count, move.rows, move.heads, dim), stride, x.storage_offset() + move.token_at * dim)


def _on_wire(move: Move, wire: torch.Tensor) -> torch.Tensor:
    dim = wire.shape[-1]
    stride = (move.wire_step * dim, move.wire_row * dim, dim, 1)
    return wire.as_strided((move.count, move.rows, move.heads, dim), stride, wire.storage_offset() + move.wire_at * dim)


def _add(move: Move, received: torch.Tensor, total: torch.Tensor, heads: Heads) -> None:
    """Add copies one after the other, so that the order of the sum is the order of the ranks."""
    row, vector = divmod(move.token_at, heads.per_token)
    for i in range(move.count):
        first = vector - heads.heads + i * move.token_step
        total[row : row + move.rows, first : first + move.heads] += received[i]
