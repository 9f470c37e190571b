"""Layouts against their definition (docs/exchange.md), all ranks in one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypack.errors import RaypackError
from raypack.exchange.layout import Layout, head_share
from raypack.plan.plan import Placement, Round
from raypack.plan.topology import Block, Topology
from tests.strategies import NODES, rounds


def place(sample, length, parent, child):
    return Placement(sample, length, Block(*parent), Block(*child), length - 1)


def tokens_by_definition(round_: Round, topology: Topology) -> list[list[tuple[int, int]]]:
    """(sample, position) of every row of every rank, token by token."""
    held = [[] for _ in range(topology.world)]
    for block in topology.blocks:  # widest first
        stream = [(p.sample, i) for p in round_.placements if p.child == block for i in range(p.length)]
        if not stream:
            continue
        base, extra = divmod(len(stream), block.width)
        ranks = range(block.first, block.end)
        favoured = sorted(ranks, key=lambda r: (len(held[r]), r))[:extra]
        at = 0
        sizes = {r: base + (r in favoured) for r in ranks}
        for r in ranks:
            held[r] = held[r] + stream[at : at + sizes[r]]
            at += sizes[r]
    return held


@given(st.data(), NODES)
def test_child_layout_is_its_definition_on_every_rank(data, nodes):
    topology = Topology(nodes)
    round_ = data.draw(rounds(topology))
    expected = tokens_by_definition(round_, topology)
    whole = Layout(round_, topology)
    for rank in range(topology.world):
        for layout in (whole, Layout(round_, topology, rank)):
            segments = layout.segments(rank)
            samples = layout.columns["sample"][segments.placement]
            rows = list(zip(np.repeat(samples, segments.lengths).tolist(), segments.positions.tolist(), strict=True))
            assert rows == expected[rank]
            assert layout.rows(rank) == len(rows)


@given(st.data(), NODES)
def test_every_token_has_exactly_one_holder_and_shards_differ_by_at_most_one(data, nodes):
    topology = Topology(nodes)
    round_ = data.draw(rounds(topology))
    layout = Layout(round_, topology)
    assert sum(map(layout.rows, range(topology.world))) == sum(p.length for p in round_.placements)
    for block in {p.child for p in round_.placements}:
        sizes = np.zeros(block.width, dtype=int)
        for run in layout.cohorts:
            if run.child == block:
                sizes += np.diff(run.cuts)
        assert sizes.max() - sizes.min() <= 1


def test_extra_tokens_of_nested_blocks_go_to_different_ranks():
    topology = Topology((4,))
    layout = Layout(Round((place(0, 5, (0, 4), (0, 4)), place(1, 3, (0, 4), (0, 2)))), topology)
    assert [layout.rows(rank) for rank in range(4)] == [3, 3, 1, 1]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 12))
def test_heads_are_shared_evenly_and_kv_heads_follow_their_queries(kv_heads, per_kv, width):
    shares = head_share(kv_heads * per_kv, kv_heads, width)
    queries = [q for q0, q1, _, _ in shares for q in range(q0, q1)]
    assert queries == list(range(kv_heads * per_kv))
    counts = [q1 - q0 for q0, q1, _, _ in shares]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    for q0, q1, k0, k1 in shares:
        assert set(range(k0, k1)) == {q // per_kv for q in range(q0, q1)}


def test_seven_heads_on_four_ranks_and_gqa_with_fewer_kv_heads_than_ranks():
    assert [q1 - q0 for q0, q1, _, _ in head_share(7, 7, 4)] == [2, 2, 2, 1]
    assert [k0 for _, _, k0, _ in head_share(8, 2, 4)] == [0, 0, 1, 1]  # not 0, 1, 0, 1
    assert head_share(28, 7, 2) == ((0, 14, 0, 4), (14, 28, 3, 7))
    assert [q1 - q0 for q0, q1, _, _ in head_share(3, 1, 8)] == [1, 1, 1, 0, 0, 0, 0, 0]


def positions(layout, rank):
    return layout.segments(rank).positions.tolist()


def test_positions_do_not_restart_at_the_shard_edge():
    layout = Layout(Round((place(0, 3, (0, 2), (0, 2)), place(1, 7, (0, 2), (0, 2)))), Topology((2,)))
    assert positions(layout, 0) == [0, 1, 2, 0, 1]
    assert positions(layout, 1) == [2, 3, 4, 5, 6]


def test_one_document_of_three_tokens_on_four_ranks_leaves_an_empty_rank():
    layout = Layout(Round((place(0, 3, (0, 4), (0, 4)),)), Topology((4,)))
    assert [layout.rows(rank) for rank in range(4)] == [1, 1, 1, 0]
    assert positions(layout, 3) == []


def test_a_document_without_tokens_on_a_rank_is_no_segment_there():
    layout = Layout(
        Round((place(0, 1, (0, 4), (0, 4)), place(1, 1, (0, 4), (0, 4)), place(2, 6, (0, 4), (0, 4)))), Topology((4,))
    )
    assert [layout.segments(r).placement.tolist() for r in range(4)] == [[0, 1], [2], [2], [2]]


def test_eight_ranks_of_one_node_have_seven_groups():
    assert len(Topology((8,)).group_blocks) == 7


@given(NODES)
def test_blocks_are_laminar_and_children_can_stay_inside_a_node(nodes):
    blocks = Topology(nodes).blocks
    for a in blocks:
        for b in blocks:
            assert a.contains(b) or b.contains(a) or not a.overlaps(b)


def test_blocks_of_unequal_nodes():
    topology = Topology((6, 3, 2))
    assert Block(0, 6) in topology.blocks  # the whole node
    assert Block(4, 2) in topology.blocks
    assert Block(4, 4) not in topology.blocks
    assert Block(0, 9) in topology.blocks  # two whole nodes, aligned
    assert Block(6, 5) not in topology.blocks  # two whole nodes, not aligned
    assert Block(0, 11) in topology.blocks  # the world
    assert topology.in_one_node(Block(6, 2))
    assert not topology.in_one_node(Block(0, 9))


@pytest.mark.parametrize("nodes", [(), (0,), (4, 0)])
def test_a_node_without_ranks_is_refused(nodes):
    with pytest.raises(RaypackError, match="at least one rank"):
        Topology(nodes)
