"""Linear attention and its convolution over several ranks: values, gradients on every rank, bytes, overlap."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.comm import collect
from raypack.config import TrainSection, load_cluster
from raypack.layers.linear import oracle as linear_oracle
from raypack.plan.plan import Plan, Round
from raypack.plan.topology import Topology
from raypack.planning.evaluate import evaluate
from tests.linear_ranks import (
    DIM,
    HEADS,
    KV_HEADS,
    attention_on_rank,
    conv_on_rank,
    document,
    gather_on_rank,
    log_decay,
    place,
    round_of,
)
from tests.ranks import Case, gradients_on_rank, tiny_model
from tests.strategies import NODES, plans, rounds
from tests.threads import calls_by_rank

pytestmark = pytest.mark.pool


def oracle(kind: str, round_: Round) -> dict[str, dict[tuple[int, int], np.ndarray]]:
    """The same by the recurrence, document by document."""
    right: dict[str, dict[tuple[int, int], np.ndarray]] = {}
    for p in round_.placements:
        parts = document(kind, p.sample, p.length)
        weight = parts.pop("weight")
        leaves = {name: x.requires_grad_() for name, x in parts.items()}
        decay = leaves.get("g", log_decay(kind))
        out = linear_oracle.linear_attention(leaves["q"], leaves["k"], leaves["v"], [p.length], decay)
        grads = torch.autograd.grad((out * weight).sum(), list(leaves.values()))
        for name, values in [("out", out.detach()), *((f"d{n}", x) for n, x in zip(leaves, grads, strict=True))]:
            right.setdefault(name, {}).update({(p.sample, t): values[t].numpy() for t in range(p.length)})
    return right


@settings(settings.get_profile("ranks"), max_examples=25)
@given(data=st.data())
def test_states_over_nested_blocks_cut_anywhere_give_outputs_and_gradients_on_every_rank(pool, data):
    nodes = data.draw(NODES)
    round_ = data.draw(rounds(Topology(nodes), most=8, longest=30))
    kind = data.draw(st.sampled_from(["none", "head", "gate"]))
    right = oracle(kind, round_)
    count = 0
    for found in pool.run(sum(nodes), attention_on_rank, nodes, round_, kind):
        count += len(found["where"])
        for name in ("out", "dq", "dk", "dv", *(["dg"] if kind == "gate" else [])):
            for row, place_ in enumerate(found["where"]):
                assert np.allclose(found[name][row], right[name][place_], rtol=0, atol=1e-10), (name, place_)
    assert count == sum(p.length for p in round_.placements)


def by_rank(results: list[dict[str, Any]], name: str) -> list[list[float]]:
    """First head, first channel, divided by what the other channels of q and k multiply it with."""
    return [np.round(r[name][:, 0, 0], 12).tolist() for r in results]


@pytest.mark.parametrize("lengths", [(3, 5)])
def test_ones_count_the_tokens_of_their_own_document_in_both_directions(pool, lengths):
    """Documents of 3 and 5 tokens over 2 ranks of 4: state neither leaks over the border nor is lost, and the suffix
    of the backward follows the same rule."""
    results = pool.run(2, attention_on_rank, (2,), round_of(2, *lengths), "ones")
    scale = DIM  # q . k of ones
    assert by_rank(results, "out") == [[n * scale for n in (1, 2, 3, 1)], [n * scale for n in (2, 3, 4, 5)]]
    share = scale * HEADS / KV_HEADS  # each value feeds the query heads of its KV head
    assert by_rank(results, "dv") == [[n * share for n in (3, 2, 1, 5)], [n * share for n in (4, 3, 2, 1)]]


def test_the_incoming_state_is_decayed_by_the_tokens_before_it(pool):
    results = pool.run(2, attention_on_rank, (2,), round_of(2, 3, 5), "ones, decay 0.5")
    expected = [[1, 1.5, 1.75, 1], [1.5, 1.75, 1.875, 1.9375]]
    assert by_rank(results, "out") == [[x * DIM for x in row] for row in expected]
    results = pool.run(2, attention_on_rank, (2,), round_of(2, 8), "ones, decay 0.5")
    assert by_rank(results, "out")[1][0] == 1.9375 * DIM


@pytest.mark.parametrize("round_", [round_of(4, 3), round_of(4, 1, 1, 6), Round(())])
def test_empty_shards_join_with_zeros(pool, round_):
    right = oracle("gate", round_)
    results = pool.run(4, attention_on_rank, (4,), round_, "gate")
    for found in results:
        assert found["out"].shape == (len(found["where"]), HEADS, DIM)
        for row, where in enumerate(found["where"]):
            assert np.allclose(found["dk"][row], right["dk"][where], rtol=0, atol=1e-12)


def conv_oracle(round_: Round, taps: int) -> tuple[dict, dict, np.ndarray]:
    out, dx, total = {}, {}, None
    for p in round_.placements:
        parts = document("none", p.sample, p.length)
        x = torch.cat([parts["q"], parts["k"]], 1).flatten(1).requires_grad_()
        weights = parts["weight"].flatten(1)
        weights = torch.cat([weights, weights], 1)[:, : x.shape[1]]
        made = torch.Generator().manual_seed(1)
        weight = torch.randn(x.shape[1], taps, generator=made, dtype=torch.float64).requires_grad_()
        y = linear_oracle.causal_conv(x, weight, [p.length])
        gx, gw = torch.autograd.grad((y * weights).sum(), (x, weight))
        total = gw if total is None else total + gw
        out.update({(p.sample, t): y[t].detach().numpy() for t in range(p.length)})
        dx.update({(p.sample, t): gx[t].numpy() for t in range(p.length)})
    return out, dx, total.numpy()


@settings(settings.get_profile("ranks"), max_examples=15)
@given(data=st.data(), taps=st.sampled_from([2, 4, 9]))
def test_convolutions_reach_back_over_ranks_but_not_over_documents(pool, data, taps):
    nodes = data.draw(NODES)
    round_ = data.draw(rounds(Topology(nodes), most=8, longest=20))
    if not round_.placements:
        return
    out, dx, dweight = conv_oracle(round_, taps)
    for where, got, got_dx, got_dweight in pool.run(sum(nodes), conv_on_rank, nodes, round_, taps, False):
        for row, token in enumerate(where):
            assert np.allclose(got[row], out[token], rtol=0, atol=1e-12)
            assert np.allclose(got_dx[row], dx[token], rtol=0, atol=1e-12)
        assert np.allclose(got_dweight, dweight, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("ranks", "lengths", "expected"),
    [
        (2, (8,), [1, 2, 3, 4, 4, 4, 4, 4]),
        (2, (3, 5), [1, 2, 3, 1, 2, 3, 4, 4]),
        (4, (8,), [1, 2, 3, 4, 4, 4, 4, 4]),
        (4, (3, 5), [1, 2, 3, 1, 2, 3, 4, 4]),
    ],
)
def test_convolution_of_ones_counts_up_to_its_taps_in_each_document(pool, ranks, lengths, expected):
    """Over 4 ranks of 2 tokens the halo of 3 lies two ranks back."""
    results = pool.run(ranks, conv_on_rank, (ranks,), round_of(ranks, *lengths), 4, True)
    assert [x for _, out, _, _ in results for x in out[:, 0].tolist()] == expected


def test_bytes_of_states_do_not_depend_on_tokens_and_follow_the_formula(pool):
    """Forward and backward, 2 nodes of 2, child widths 4 and 2: slots x state to each other rank of the component."""
    counted = {}
    for kind, forward in (("none", 0), ("gate", KV_HEADS * DIM)):
        for tokens in (2048, 16_384, 65_536):
            round_ = Round((place(0, tokens - 512, 0, 4), place(1, 256, 0, 2), place(2, 256, 2, 2)))
            results = pool.run(4, gather_on_rank, (2, 2), round_, kind)
            state = 2 * KV_HEADS * DIM * DIM * 8  # two slots, fp64
            for collected in results:
                each = state + 2 * forward * 8 + state  # states with their gates, then gradients of states
                assert collected == {("state_gather", "intra"): each, ("state_gather", "inter"): 2 * each}
            counted[kind, tokens] = results[0]
    assert len({str(v) for (kind, _), v in counted.items() if kind == "gate"}) == 1


def test_states_of_a_bf16_model_are_fp32(pool):
    plan = Plan(nodes=(2,), rounds=(round_of(2, 40, 9),))
    case = Case(tiny_model(pattern="L", layers=2, experts=0), TrainSection(dtype="bfloat16", chunk_tokens=16))
    for _, grads, ledger in pool.run(2, gradients_on_rank, case, plan):
        assert (
            ledger["collected"]["state_gather", "intra"] == 2 * 2 * 2 * 4 * 4 * 4
        )  # layers, ways, KV heads, D, D, fp32
        assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize(("recompute", "ways"), [("none", 2), ("full", 3)])
def test_one_gather_a_layer_and_direction(pool, monkeypatch, recompute, ways):
    nested = (place(0, 9, 0, 4), place(1, 7, 0, 2), place(2, 3, 2, 2), place(3, 5, 3, 1))
    plan = Plan(nodes=(4,), rounds=(Round(nested, recompute),))
    case = Case(tiny_model(pattern="L", layers=3, experts=0, linear_decay="gate"))
    calls = calls_by_rank(monkeypatch, collect, "all_gather")
    pool.run(4, gradients_on_rank, case, plan)
    assert Counter(calls) == dict.fromkeys(range(4), 3 * ways)


@settings(settings.get_profile("ranks"), max_examples=6)
@given(data=st.data())
def test_the_ledger_counts_gathers_as_the_cost_model_does(pool, data):
    nodes = data.draw(NODES)
    plan = data.draw(plans(Topology(nodes), gather=True))
    if plan.labels == 0:
        return
    model = tiny_model(pattern="LF", layers=3, linear_decay="gate", linear_conv=4, experts=0)
    case = Case(model, TrainSection(dtype="float32", chunk_tokens=9))
    figures = evaluate(plan, load_cluster("local-2x4", {"rank_tokens_max": 10_000}), model, itemsize=4)
    counted: Counter[tuple[str, str]] = Counter()
    for _, _, ledger in pool.run(sum(nodes), gradients_on_rank, case, plan):
        counted.update(ledger["collected"])
    for op in ("state_gather", "kv_gather"):
        for scope in ("intra", "inter"):
            assert counted[op, scope] == figures.bytes.get(op, {}).get(scope, 0), (op, scope)
