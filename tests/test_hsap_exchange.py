"""The two-dimensional head layout of hsap: heads over the ranks of a node, segments over the nodes of the parent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypack.errors import RaypackError
from raypack.exchange.heads.plan import Heads
from raypack.exchange.hsap.spread import build_spread
from raypack.exchange.layout import Layout, head_share
from raypack.plan.plan import Plan, Round, check_plan
from raypack.plan.topology import Block, Topology
from tests.strategies import rounds
from tests.test_exchange import DIM, HEADS, backward, build, forward, marked
from tests.test_layout import place, tokens_by_definition

EVEN = st.sampled_from([(4, 4), (2, 2), (2, 2, 2, 2), (1, 1, 1), (3, 3), (3, 3, 3), (2, 2, 1), (4, 2, 2), (1,)])


@st.composite
def hsap_rounds(draw, topology: Topology, most: int = 8, longest: int = 20) -> Round:
    """Placements of both kinds; hsap wherever the nodes of the parent allow it, at will."""
    round_ = draw(rounds(topology, most=most, longest=longest))
    made = []
    for p in round_.placements:
        even = len(set(topology.node_sizes(p.parent))) == 1
        made.append(
            p._replace(attention=draw(st.sampled_from(["hsap", "hsap", "ulysses"]) if even else st.just("ulysses")))
        )
    return Round(tuple(made))


@given(st.data(), EVEN, HEADS, st.booleans())
def test_a_node_gets_its_segments_tokens_and_a_rank_its_share_of_the_heads(data, nodes, shape, kv):
    topology, heads = Topology(nodes), Heads(*shape, kv)
    round_ = data.draw(hsap_rounds(topology))
    held = tokens_by_definition(round_, topology)
    numbers, xs = marked(held, heads.per_token)
    exchanges = build(round_, topology, heads, True)
    owners: dict[tuple[int, int, int], int] = {}
    for rank, calls in enumerate(forward(exchanges, xs)):
        spread = build_spread(Layout(round_, topology, rank), rank)
        for call, got in zip(exchanges[rank].calls, calls, strict=True):
            if not call.spread:
                continue
            assert spread is not None
            layout = Layout(round_, topology, rank)
            samples = layout.columns["sample"][spread.placements].tolist()
            segments = spread.schedule.segments
            mine = [
                (samples[d], t)
                for d, a, b, n in zip(
                    *(c.tolist() for c in (segments.document, segments.low, segments.high, segments.node)), strict=True
                )
                if n == spread.schedule.node
                for t in range(a, b)
            ]
            q0, q1, k0, k1 = head_share(*shape, spread.width)[spread.share]
            vectors = list(range(q0, q1))
            if kv:
                vectors += [shape[0] + k for k in range(k0, k1)] + [sum(shape) + k for k in range(k0, k1)]
            assert got.shape == (len(mine), len(vectors), DIM)
            assert got[..., 0].tolist() == [[numbers[token] * heads.per_token + v for v in vectors] for token in mine]
            for sample, t in mine:
                for q in range(q0, q1):
                    assert owners.setdefault((sample, t, q), rank) == rank
    spread_samples = [p for p in round_.placements if p.attention == "hsap" and not topology.in_one_node(p.parent)]
    assert len(owners) == sum(p.length for p in spread_samples) * shape[0]


@given(st.data(), EVEN, HEADS, st.booleans())
def test_the_reverse_exchange_is_the_adjoint(data, nodes, shape, kv):
    topology, heads = Topology(nodes), Heads(*shape, kv)
    round_ = data.draw(hsap_rounds(topology))
    exchanges = build(round_, topology, heads, True)
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(e.rows, heads.per_token, DIM, generator=generator, dtype=torch.float64) for e in exchanges]
    ax = forward(exchanges, xs)
    ys = [[torch.randn(c.shape, generator=generator, dtype=torch.float64) for c in calls] for calls in ax]
    back = backward(exchanges, ys, xs)
    left = sum(float((a * y).sum()) for calls, y_s in zip(ax, ys, strict=True) for a, y in zip(calls, y_s, strict=True))
    right = sum(float((x * b).sum()) for x, b in zip(xs, back, strict=True))
    assert left == pytest.approx(right, rel=1e-12, abs=1e-9)


@given(st.data(), EVEN, HEADS)
def test_there_and_back_is_bit_exact_where_nothing_is_copied(data, nodes, shape):
    topology, heads = Topology(nodes), Heads(*shape, kv_travels=False)
    round_ = data.draw(hsap_rounds(topology))
    exchanges = build(round_, topology, heads, True)
    xs = [torch.randn(e.rows, heads.per_token, DIM) for e in exchanges]
    for x, back in zip(xs, backward(exchanges, forward(exchanges, xs), xs), strict=True):
        assert torch.equal(x, back)


def test_a_short_sample_of_the_same_pack_is_not_spread():
    topology, heads = Topology((2, 2)), Heads(4, 2)
    long = place(0, 40, (0, 4), (0, 2))._replace(attention="hsap")
    short = place(1, 6, (0, 4), (2, 2))
    exchange = build(Round((long, short)), topology, heads, True)[3]
    assert [(c.spread, c.lengths, c.heads) for c in exchange.calls] == [
        (False, (6,), (3, 4, 1, 2)),
        (True, (12,), (2, 4, 1, 2)),
    ]


def test_hsap_inside_one_node_is_the_exchange_of_heads():
    topology, heads = Topology((4,)), Heads(4, 2)
    plain = Round((place(0, 40, (0, 4), (0, 2)),))
    hsap = Round(tuple(p._replace(attention="hsap") for p in plain.placements))
    assert build(plain, topology, heads, True) == build(hsap, topology, heads, True)


def test_hsap_over_unequal_nodes_is_refused_and_the_nodes_are_named():
    plan = Plan(nodes=(4, 2), rounds=(Round((place(7, 40, (0, 6), (0, 4))._replace(attention="hsap"),)),))
    with pytest.raises(RaypackError, match=r"sample 7: hsap needs .* node 0 has 4 ranks, node 1 has 2 ranks"):
        check_plan(plan)


def test_documents_at_home_send_nothing_across_nodes():
    """Two equal documents, one at home on each node: with hsap no vector crosses, with ulysses half of them do."""
    topology, heads = Topology((2, 2)), Heads(4, 2)
    hsap = Round(tuple(place(i, 20, (0, 4), (2 * i, 2))._replace(attention="hsap") for i in range(2)))
    plain = Round(tuple(p._replace(attention="ulysses") for p in hsap.placements))
    crossing = {}
    for name, round_ in (("hsap", hsap), ("plain", plain)):
        exchanges = build(round_, topology, heads, True)
        crossing[name] = sum(sum(e.send[2:]) if e.rank < 2 else sum(e.send[:2]) for e in exchanges)
    assert crossing["hsap"] == 0
    assert crossing["plain"] == 2 * 20 * (heads.share(4, 0) + heads.share(4, 1))
    assert Block(0, 4) == build(hsap, topology, heads, True)[0].block
