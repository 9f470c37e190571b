"""Who sends and gets which states and halo rows: the pure decisions against a table of every token's place."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raypack.exchange.gathered.plan import gathers, plan_gather
from raypack.exchange.halo.plan import plan_halo
from raypack.exchange.lasp2.states import plan_states
from raypack.exchange.layout import Layout
from raypack.plan.plan import Placement, Round
from raypack.plan.topology import Block, Topology
from tests.strategies import NODES, rounds


def token_table(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """(sample, position) of every row of a rank."""
    segments = layout.segments(rank)
    samples = np.repeat(layout.columns["sample"][segments.placement], segments.lengths)
    return list(zip(samples.tolist(), segments.positions.tolist(), strict=True))


def of_block(rows: list[tuple[int, int]], round_: Round, child: Block) -> list[tuple[int, int]]:
    inside = {p.sample for p in round_.placements if p.child == child}
    return [row for row in rows if row[0] in inside]


def children_around(round_: Round, rank: int) -> list[Block]:
    return sorted({p.child for p in round_.placements if p.child.holds(rank)}, key=lambda b: -b.width)


@given(data=st.data())
def test_every_border_names_the_ranks_that_hold_the_rest_of_its_document(data):
    topology = Topology(data.draw(NODES))
    round_ = data.draw(rounds(topology))
    tables = [token_table(Layout(round_, topology, rank), rank) for rank in range(topology.world)]
    for rank in range(topology.world):
        layout = Layout(round_, topology, rank)
        plan = plan_states(layout, rank, layout.segments(rank))
        assert sum(plan.sections) == sum(plan.pieces) == len(tables[rank])
        starts = [0, *itertools.accumulate(plan.sections)]
        crossing = set()
        for link in plan.links:
            child = next(b for b in children_around(round_, rank) if b.width == plan.widths[link.slot])
            mine = of_block(tables[rank], round_, child)
            for border, edge, side in ((link.entering, 0, -1), (link.leaving, -1, 1)):
                sample = mine[edge][0]
                ranks = [
                    r
                    for r in range(child.first, child.end)
                    if (r - rank) * side > 0 and any(s == sample for s, _ in of_block(tables[r], round_, child))
                ]
                if border is None:
                    assert not ranks
                    continue
                first, end = border.ranks
                assert min(ranks) == (plan.block.first + first if side < 0 else min(ranks))
                assert max(ranks) == (plan.block.first + end - 1 if side > 0 else max(ranks))
                assert (end if side < 0 else first) == rank - plan.block.first + (side > 0)
                held = [
                    sum(row[0] == sample for row in of_block(tables[r + plan.block.first], round_, child))
                    for r in range(first, end)
                ]
                assert list(border.rows) == held
                rows = tables[rank][starts[border.section] : starts[border.section + 1]]
                assert rows == [row for row in mine if row[0] == sample]
                assert rows[0][1] == border.position
                crossing.add((sample, side))
            assert link.passes == (
                len({row[0] for row in mine}) == 1 and {(mine[0][0], s) for s in (-1, 1)} <= crossing
            )


@given(data=st.data())
def test_slots_are_one_for_each_child_width_and_the_same_on_all_ranks_of_a_component(data):
    topology = Topology(data.draw(NODES))
    round_ = data.draw(rounds(topology))
    plans = {}
    for rank in range(topology.world):
        layout = Layout(round_, topology, rank)
        plans[rank] = plan_states(layout, rank, layout.segments(rank))
        component = plans[rank].block
        inside = {p.child.width for p in round_.placements if component.contains(p.child)} - {1}
        assert plans[rank].widths == tuple(sorted(inside, reverse=True))
    for rank, plan in plans.items():
        for other in range(plan.block.first, plan.block.end):
            assert (plans[other].block, plans[other].widths) == (plan.block, plan.widths), (rank, other)


@given(data=st.data(), taps=st.integers(2, 9))
def test_halos_are_the_rows_before_each_shard_in_its_document(data, taps):
    topology = Topology(data.draw(NODES))
    round_ = data.draw(rounds(topology, longest=12))
    layouts = [Layout(round_, topology, rank) for rank in range(topology.world)]
    plans = [plan_halo(layout, rank, layout.segments(rank), taps) for rank, layout in enumerate(layouts)]
    tables = [token_table(layout, rank) for rank, layout in enumerate(layouts)]
    for rank, plan in enumerate(plans):
        arrived: list[tuple[int, int]] = []
        for source in range(plan.block.first, plan.block.end):
            other = plans[source]
            ends = list(itertools.accumulate(other.send))
            at = rank - other.block.first
            rows = other.rows[ends[at] - other.send[at] : ends[at]]
            assert len(rows) == plan.receive[source - plan.block.first]
            arrived += [tables[source][row] for row in rows]
        halo = iter([arrived[i] for i in plan.order])
        whole, since = [], iter(plan.since.tolist())
        inserts = dict(plan.inserts)
        for row, token in enumerate(tables[rank]):
            for _ in range(inserts.get(row, 0)):
                whole.append((next(halo), next(since)))
            whole.append((token, next(since)))
        tokens = [token for token, _ in whole]
        for (sample, position), before in whole:
            reach = min(before, taps - 1)
            at = tokens.index((sample, position))
            assert tokens[at - reach : at] == [(sample, position - w) for w in range(reach, 0, -1)]
        for sample, position in tables[rank]:
            assert whole[tokens.index((sample, position))][1] >= min(position, taps - 1)


@given(data=st.data())
def test_gathered_keys_are_the_document_up_to_this_ranks_last_row(data):
    topology = Topology(data.draw(NODES))
    drawn = data.draw(rounds(topology))
    kinds = [data.draw(st.sampled_from(["ulysses", "kv_gather"])) for _ in drawn.placements]
    round_ = Round(
        tuple(
            p._replace(parent=p.child if kind == "kv_gather" else p.parent, attention=kind)
            for p, kind in zip(drawn.placements, kinds, strict=True)
        )
    )
    gathered = {p.sample for p in round_.placements if p.attention == "kv_gather" and p.child.width > 1}
    layouts = [Layout(round_, topology, rank) for rank in range(topology.world)]
    tables = [token_table(layout, rank) for rank, layout in enumerate(layouts)]
    plans = [plan_gather(layout, rank) for rank, layout in enumerate(layouts)]
    for rank, plan in enumerate(plans):
        kept = layouts[rank].keeping(lambda run: not gathers(run))
        assert [row for row in tables[rank] if row[0] not in gathered] == token_table(kept, rank)
        assert kept.rows(rank) == len(token_table(kept, rank))
        if plan is None:
            assert not any(p.child.holds(rank) for p in round_.placements if p.sample in gathered)
            continue
        assert sum(rows for rows, _ in plan.sections) == len(tables[rank])
        for block in plan.blocks:
            shards = [
                [t for t in of_block(tables[r], round_, block.block) if t[0] in gathered] for r in range(*_span(block))
            ]
            mine = shards[rank - block.block.first]
            assert block.longest == max(map(len, shards))
            assert block.rows == len(mine) == sum(block.queries)
            keys = [token for source, first, end in block.remote for token in shards[source][first:end]] + mine
            ends = list(itertools.accumulate(block.keys))
            assert len(keys) == sum(block.keys)
            for count, own, end in zip(block.keys, block.queries, ends, strict=True):
                assert 0 < own <= count
                document = keys[end - count : end]
                assert document == [(document[0][0], position) for position in range(count)]


def _span(block) -> tuple[int, int]:
    return block.block.first, block.block.end


def place(sample, length, first, width):
    return Placement(sample, length, Block(first, width), Block(first, width), length - 1)


def test_a_document_over_three_ranks_passes_through_the_middle_one():
    topology = Topology((4,))
    layout = Layout(Round((place(0, 10, 0, 4), place(1, 2, 0, 4))), topology, 1)
    (link,) = plan_states(layout, 1, layout.segments(1)).links
    assert link.passes
    assert link.entering is not None
    assert link.leaving is not None
    assert link.entering.ranks == (0, 1)
    assert link.leaving.ranks == (2, 4)
    assert link.leaving.rows == (3, 1)


def test_a_border_on_the_edge_of_a_shard_crosses_nothing():
    topology = Topology((2,))
    for rank in range(2):
        layout = Layout(Round((place(0, 5, 0, 2), place(1, 5, 0, 2))), topology, rank)
        plan = plan_states(layout, rank, layout.segments(rank))
        assert plan.widths == (2,)
        assert [(link.entering, link.leaving) for link in plan.links] == [(None, None)]
