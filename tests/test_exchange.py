"""Exchanges against their definition, all ranks simulated in one process: no process group involved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypack.exchange.heads.plan import Exchange, Heads, build_exchange
from raypack.exchange.heads.run import pack, pack_calls, unpack, unpack_tokens
from raypack.exchange.layout import Layout, head_share
from raypack.plan.plan import Round
from raypack.plan.topology import Topology
from tests.strategies import NODES, rounds
from tests.test_layout import place, tokens_by_definition

HEADS = st.sampled_from([(1, 1), (4, 4), (8, 2), (7, 7), (6, 3), (3, 1), (28, 7), (10, 5)])
DIM = 2


def deliver(exchanges: list[Exchange], wires: list[torch.Tensor], to_heads: bool) -> list[torch.Tensor]:
    """What each rank receives if every component runs one all-to-all."""
    received = []
    for me, mine in enumerate(exchanges):
        parts = []
        for source in range(mine.block.first, mine.block.end):
            other = exchanges[source]
            assert other.block == mine.block
            sizes = other.send if to_heads else other.receive
            start = sum(sizes[: me - mine.block.first])
            parts.append(wires[source][start : start + sizes[me - mine.block.first]])
        expected = mine.receive if to_heads else mine.send
        assert [len(p) for p in parts] == list(expected)
        received.append(torch.cat(parts) if mine.block.width > 1 else wires[me])
    return received


def forward(exchanges, xs):
    wires = deliver(exchanges, [pack(e, x) for e, x in zip(exchanges, xs, strict=True)], True)
    return [unpack(e, w, x) for e, w, x in zip(exchanges, wires, xs, strict=True)]


def backward(exchanges, calls, likes):
    wires = [pack_calls(e, c, like) for e, c, like in zip(exchanges, calls, likes, strict=True)]
    wires = deliver(exchanges, wires, False)
    return [unpack_tokens(e, w, c, like) for e, w, c, like in zip(exchanges, wires, calls, likes, strict=True)]


def build(round_, topology, heads, full):
    return [build_exchange(Layout(round_, topology, r), r, heads, full=full) for r in range(topology.world)]


def marked(held, per_token):
    """Every vector carries its own number: token * per_token + head."""
    numbers = {}
    xs = []
    for rows in held:
        for token in rows:
            numbers[token] = len(numbers)
        ids = torch.tensor([numbers[t] for t in rows], dtype=torch.float64).view(-1, 1, 1)
        xs.append((ids * per_token + torch.arange(per_token).view(1, -1, 1)).expand(-1, -1, DIM).contiguous())
    return numbers, xs


@given(st.data(), NODES, HEADS, st.booleans(), st.booleans())
def test_heads_receive_exactly_the_tokens_and_heads_of_the_definition(data, nodes, shape, full, kv):
    topology, heads = Topology(nodes), Heads(*shape, kv)
    round_ = data.draw(rounds(topology, most=8, longest=20))
    held = tokens_by_definition(round_, topology)
    numbers, xs = marked(held, heads.per_token)
    exchanges = build(round_, topology, heads, full)
    for rank, calls in enumerate(forward(exchanges, xs)):
        owners = [b for b in topology.blocks if b.holds(rank)]
        owners = [b for b in owners if any((p.parent if full else p.child) == b for p in round_.placements)]
        assert [c.block for c in exchanges[rank].calls] == owners
        for owner, call, got in zip(owners, exchanges[rank].calls, calls, strict=True):
            samples = [p for p in round_.placements if (p.parent if full else p.child) == owner]
            assert call.lengths == tuple(p.length for p in samples)
            q0, q1, k0, k1 = head_share(*shape, owner.width)[rank - owner.first]
            vectors = list(range(q0, q1))
            if kv:
                vectors += [shape[0] + k for k in range(k0, k1)] + [sum(shape) + k for k in range(k0, k1)]
            expected = [
                [numbers[p.sample, i] * heads.per_token + v for v in vectors] for p in samples for i in range(p.length)
            ]
            assert got.shape == (call.tokens, len(vectors), DIM)
            assert got[..., 0].tolist() == expected


@given(st.data(), NODES, HEADS, st.booleans())
def test_the_wire_is_ordered_by_destination_placement_token_head(data, nodes, shape, full):
    topology, heads = Topology(nodes), Heads(*shape)
    round_ = data.draw(rounds(topology, most=6, longest=12))
    held = tokens_by_definition(round_, topology)
    numbers, xs = marked(held, heads.per_token)
    for rank, exchange in enumerate(build(round_, topology, heads, full)):
        expected = []
        for destination in range(topology.world):
            for p in round_.placements:
                owner = p.parent if full else p.child
                if owner.width == 1 or not owner.holds(destination):
                    continue
                q0, q1, k0, k1 = head_share(*shape, owner.width)[destination - owner.first]
                vectors = [
                    *range(q0, q1),
                    *(shape[0] + k for k in range(k0, k1)),
                    *(sum(shape) + k for k in range(k0, k1)),
                ]
                tokens = sorted(i for sample, i in held[rank] if sample == p.sample)
                expected += [numbers[p.sample, i] * heads.per_token + v for i in tokens for v in vectors]
        assert pack(exchange, xs[rank])[:, 0].tolist() == expected


@given(st.data(), NODES, HEADS, st.booleans(), st.booleans())
def test_the_reverse_exchange_is_the_adjoint(data, nodes, shape, full, kv):
    topology, heads = Topology(nodes), Heads(*shape, kv)
    round_ = data.draw(rounds(topology))
    exchanges = build(round_, topology, heads, full)
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(e.rows, heads.per_token, DIM, generator=generator, dtype=torch.float64) for e in exchanges]
    ax = forward(exchanges, xs)
    ys = [[torch.randn(c.shape, generator=generator, dtype=torch.float64) for c in calls] for calls in ax]
    back = backward(exchanges, ys, xs)
    left = sum(float((a * y).sum()) for calls, y_s in zip(ax, ys, strict=True) for a, y in zip(calls, y_s, strict=True))
    right = sum(float((x * b).sum()) for x, b in zip(xs, back, strict=True))
    assert left == pytest.approx(right, rel=1e-12, abs=1e-9)


@given(st.data(), NODES, HEADS, st.booleans())
def test_there_and_back_is_bit_exact_where_nothing_is_copied(data, nodes, shape, full):
    topology, heads = Topology(nodes), Heads(*shape, kv_travels=False)
    round_ = data.draw(rounds(topology))
    exchanges = build(round_, topology, heads, full)
    xs = [torch.randn(e.rows, heads.per_token, DIM) for e in exchanges]
    for x, back in zip(xs, backward(exchanges, forward(exchanges, xs), xs), strict=True):
        assert torch.equal(x, back)


def test_copies_of_a_kv_head_are_summed_in_fp32_and_in_rank_order():
    """1 + 2^-8 + 2^-8: a bf16 running sum would drop both small terms."""
    topology, heads = Topology((4,)), Heads(4, 1)
    exchanges = build(Round((place(0, 4, (0, 4), (0, 4)),)), topology, heads, True)
    terms = [1.0, 2.0**-8, 2.0**-8, 0.0]
    calls = [[torch.full((4, 3, DIM), t, dtype=torch.bfloat16)] for t in terms]
    likes = [torch.zeros(1, 6, DIM, dtype=torch.bfloat16)] * 4
    for x in backward(exchanges, calls, likes):
        assert x[0, 4:, 0].tolist() == [1.0078125, 1.0078125]


def test_disjoint_children_in_rank_order_need_no_copy_on_arrival():
    """The layout change rides on the exchange: the received buffer is the attention input (docs/exchange.md)."""
    topology, heads = Topology((4, 4)), Heads(8, 4)
    round_ = Round(tuple(place(i, 16 + i, (0, 8), (i, 1)) for i in range(8)))
    exchanges = build(round_, topology, heads, True)
    for exchange in exchanges:
        assert len(exchange.gather) == 1
        assert len(exchange.pieces) == 1


def test_a_sample_on_its_own_rank_never_touches_the_wire():
    topology, heads = Topology((4,)), Heads(4, 2)
    round_ = Round((place(0, 100, (0, 4), (0, 4)), place(1, 7, (2, 1), (2, 1))))
    exchange = build_exchange(Layout(round_, topology, 2), 2, heads, full=True)
    assert sum(exchange.send) == 25 * (heads.share(4, 0) + heads.share(4, 1) + heads.share(4, 2) + heads.share(4, 3))
    assert exchange.local == (1, 25, 32)


def test_regular_shares_are_packed_in_few_strided_copies():
    topology, heads = Topology((8,)), Heads(32, 4)
    exchange = build_exchange(Layout(Round((place(0, 64, (0, 8), (0, 8)),)), topology, 3), 3, heads, full=True)
    assert len(exchange.moves) == 1 + 4 + 4  # all of Q at once; each KV head to its two ranks
