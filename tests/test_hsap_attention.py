"""hsap attention against the one-rank oracle: outputs and gradients, every rank, NaN-poisoned buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.plan.plan import Round
from raypack.plan.topology import Topology
from tests.hsap_ranks import Case, attend_on_rank, oracle
from tests.test_hsap_exchange import EVEN, hsap_rounds
from tests.test_layout import place

pytestmark = pytest.mark.pool

SHAPES = st.sampled_from([(4, 4), (8, 2), (3, 1), (7, 7), (6, 3), (10, 5), (1, 1)])


def hsap(sample, length, parent, child):
    return place(sample, length, parent, child)._replace(attention="hsap")


def check(pool, case: Case, nodes: tuple[int, ...], rounds: list[Round], tolerance: float = 1e-10, **options) -> dict:
    results = pool.run(sum(nodes), attend_on_rank, case, rounds, nodes, **options)
    for number, round_ in enumerate(rounds):
        expected = oracle(case, round_)
        got = {place: value for found, _ in results for place, value in found[number].items()}
        assert got.keys() == expected.keys()
        for where, (out, grad) in expected.items():
            assert np.abs(got[where][0] - out).max() <= tolerance * max(1, np.abs(out).max()), where
            assert np.abs(got[where][1] - grad).max() <= tolerance * max(1, np.abs(grad).max()), where
    total: dict = {}
    for _, ledger in results:
        for key, count in ledger.items():
            total[key] = total.get(key, 0) + count
    return total


@settings(settings.get_profile("ranks"), max_examples=40)
@given(data=st.data(), nodes=EVEN, shape=SHAPES, step_rows=st.sampled_from([1, 3, 8, 8192]))
def test_any_pack_on_any_grid_gives_the_outputs_and_gradients_of_one_rank(pool, data, nodes, shape, step_rows):
    rounds = [data.draw(hsap_rounds(Topology(nodes), most=6, longest=30)) for _ in range(2)]
    check(pool, Case(*shape, step_rows=step_rows), nodes, rounds)


@pytest.mark.parametrize("nodes", [(1,), (1, 1), (2, 2), (4, 4), (2, 2, 2, 2), (1, 1, 1), (3, 3, 3)])
def test_documents_inside_a_node_over_two_and_over_all_beside_short_ones(pool, nodes):
    """One long document over all nodes; one nested in two; one in a node; short ones by heads and at home."""
    world, node = sum(nodes), nodes[0]
    two = 2 * node if len(nodes) in (2, 4) else world
    placements = [
        hsap(0, 61, (0, world), (0, node)),
        hsap(1, 33, (0, two), (0, two)),
        hsap(2, 17, (0, node), (0, 1)),
        place(3, 9, (0, world), (world - 1, 1)),
        place(4, 5, (world - 1, 1), (world - 1, 1)),
        hsap(5, 1, (0, world), (world - node, node)),
    ]
    check(pool, Case(6, 3, step_rows=4), nodes, [Round(tuple(placements))])


@pytest.mark.parametrize("shape", [(3, 1), (4, 1), (8, 2), (7, 7), (12, 4)])
def test_fewer_heads_than_ranks_one_kv_head_and_sharers(pool, shape):
    """Two nodes of four: idle ranks (3 heads), one KV head on all ranks of a node, unequal shares."""
    placements = (hsap(0, 50, (0, 8), (0, 4)), hsap(1, 21, (0, 8), (4, 4)), hsap(2, 3, (0, 8), (5, 1)))
    check(pool, Case(*shape, step_rows=5), (4, 4), [Round(placements)])


def test_changing_a_token_leaves_every_output_before_it_and_every_other_document_alone(pool):
    round_ = Round((hsap(0, 37, (0, 4), (0, 2)), hsap(1, 11, (0, 4), (2, 2))))
    case, at = Case(4, 2, step_rows=4), 20
    before, after = {}, {}
    for into, change in ((before, None), (after, (0, at))):
        for found, _ in pool.run(4, attend_on_rank, case, [round_], (2, 2), change):
            into.update(found[0])
    for (sample, position), (out, _) in before.items():
        same = np.array_equal(out, after[sample, position][0])
        assert same == (sample != 0 or position < at), (sample, position)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_lower_precision_stays_near_the_fp64_oracle(pool, dtype, tolerance):
    """bf16: 8 bits in inputs, outputs and each partial output, so a few units of 2^-8 of the largest value."""
    rounds = [Round((hsap(0, 70, (0, 4), (0, 2)), hsap(1, 30, (0, 4), (2, 2))))]
    check(pool, Case(4, 2, step_rows=9, dtype=dtype), (2, 2), rounds, tolerance)


def test_no_key_crosses_nodes_twice(pool):
    """One document of 40 tokens over two nodes, cut at 28: node 1 needs 28 tokens of both KV heads, K and V, once going
    forward; backward fetches them again and returns as many gradients. Each KV head has two holders on a node, who
    carry a half each and pass it on."""
    case = Case(8, 2)
    total = check(pool, case, (4, 4), [Round((hsap(0, 40, (0, 8), (0, 4)),))])
    once = 28 * 2 * case.kv_heads * case.dim * 8
    assert total["kv_exchange", "inter"] == 3 * once
    assert total["kv_exchange", "intra"] == 3 * once


def test_documents_at_home_move_nothing_across_nodes(pool):
    placements = [hsap(i, 30, (0, 4), (2 * (i % 2), 2)) for i in range(4)]
    total = check(pool, Case(4, 2), (2, 2), [Round(tuple(placements))])
    assert {key: count for key, count in total.items() if count and key[1] == "inter"} == {}
