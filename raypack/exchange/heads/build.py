"""An exchange from a layout: what one rank sends to and receives from every other, as moves and pieces.

Pure, on the host. A run travels where its heads' block is more than one rank; a run that is spread over nodes goes to
the node that attends for the token, and there by heads to the node's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypack.exchange.heads.exchange import Call, Exchange, Heads, Move, Piece
from raypack.exchange.hsap.spread import Spread, build_spread, is_spread
from raypack.exchange.layout import Layout, Run
from raypack.plan.heads import head_share
from raypack.plan.topology import Block


def build_exchange(layout: Layout, rank: int, heads: Heads, *, full: bool) -> Exchange:
    """The exchange of `rank` between its tokens and the heads of full (`full`) or sparse layers."""
    block = layout.component(rank, full)
    runs = [run for run in layout.runs if run.block(full).overlaps(block)]
    spread = build_spread(layout, rank) if full else None
    travelling = [run for run in runs if run.block(full).width > 1]
    going = [part for run in travelling if run.child.holds(rank) for part in _going(layout, run, rank, full, spread)]
    held = [_held(layout, run, full, spread) for run in travelling if run.block(full).holds(rank)]
    moves, send = _token_side(going, block, heads)
    calls, pieces, receive = _head_side(layout, held, rank, block, heads, spread)
    alone = [run for run in runs if run.block(full) == Block(rank, 1)]
    local = None
    if alone:
        lengths = tuple(n for run in alone for n in layout.lengths(run))
        first = min(run.rows[0] for run in alone)
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
    """A run whose heads this rank holds: rows [bounds[i], bounds[i + 1]) of the call come from rank i of its child."""

    run: Run
    block: Block
    spread: bool
    bounds: tuple[int, ...]


def _going(layout: Layout, run: Run, rank: int, full: bool, spread: Spread | None) -> list[_Going]:
    """Where the rows of a run that this rank holds go, in row order."""
    i = rank - run.child.first
    row, low, high = run.rows[i], run.cuts[i], run.cuts[i + 1]
    if spread is not None and is_spread(layout, run):
        parts = spread.parts(layout, run, low, high)
        return [_Going(row + a - low, b - a, spread.node_block(node)) for node, a, b in parts]
    return [_Going(row, high - low, run.block(full))] if high > low else []


def _held(layout: Layout, run: Run, full: bool, spread: Spread | None) -> _Held:
    """`bounds` count from the run's own first row; `_head_side` knows what stands before it."""
    if spread is not None and is_spread(layout, run):
        return _Held(run, spread.block, True, spread.bounds(layout, run))
    return _Held(run, run.block(full), False, run.cuts)


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
                starts[each.run.first] = sum(lengths)
                lengths.extend(
                    spread.lengths(each.run) if spread is not None and each.spread else layout.lengths(each.run)
                )
        split = spread.node_block(spread.node_of(rank)) if spread is not None and owner[1] else owner[0]
        index = rank - split.first
        share = head_share(heads.heads, heads.kv_heads, split.width)[index]
        calls.append(Call(owner[0], tuple(lengths), share, heads.share(split.width, index), owner[1]))
    pieces, receive, at = [], [], 0
    for source in range(block.first, block.end):
        before = at
        for each in held:
            if not each.run.child.holds(source):
                continue
            i = source - each.run.child.first
            rows = each.bounds[i + 1] - each.bounds[i]
            if rows:
                call = owners.index((each.block, each.spread))
                pieces.append(Piece(call, starts[each.run.first] + each.bounds[i], rows, at))
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
