"""Plans for models with linear layers and with gathered keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.config import ModelConfig, load_cluster
from raypack.errors import RaypackError
from raypack.plan.names import POLICIES
from raypack.plan.plan import Placement, Plan, Round, check_plan
from raypack.plan.samples import Samples
from raypack.plan.topology import Block, Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import BASELINES, make_plan
from tests.planning_cases import CLUSTER, MODEL, lengths, models

HYBRID = MODEL.model_copy(update={"pattern": "LLLF", "heads": 8, "kv_heads": 1})


def plan_of(seed: int, model: ModelConfig, policy: str, attention: str, nodes: tuple[int, ...] = (4, 4)) -> Plan:
    samples = Samples.of_lengths(lengths(seed, 24))
    return make_plan(samples, Topology(nodes), CLUSTER, model, policy, attention=attention, budget=50)


@settings(max_examples=15, deadline=None)
@given(model=models(), policy=st.sampled_from(POLICIES), seed=st.integers(0, 50))
def test_forced_gathers_have_parent_equal_child_and_gather_wherever_there_is_company(model, policy, seed):
    plan = plan_of(seed, model, policy, "kv_gather")
    check_plan(plan)
    for p in plan.placements:
        assert p.parent == p.child
        heads = policy in BASELINES or p.parent.width == 1
        assert p.attention == ("ulysses" if heads else "kv_gather")
    figures = evaluate(plan, CLUSTER, model)
    assert figures.seconds >= figures.bound_seconds * (1 - 1e-9)


@settings(max_examples=15, deadline=None)
@given(model=models(), policy=st.sampled_from(POLICIES), seed=st.integers(0, 50))
def test_free_choice_is_never_slower_than_exchanging_heads(model, policy, seed):
    free, exchanged = (plan_of(seed, model, policy, attention) for attention in ("auto", "ulysses"))
    check_plan(free)
    seconds = [evaluate(plan, CLUSTER, model).seconds for plan in (free, exchanged)]
    assert seconds[0] <= seconds[1] * (1 + 1e-9)


def test_keys_are_gathered_where_they_are_few_and_heads_exchanged_where_they_are_many():
    """Documents that need all four ranks, over slow links."""
    gathered = {}
    slow = CLUSTER.model_copy(update={"rank_tokens_max": 400, "intra_rate": 1e8})
    for kv_heads in (1, 8):
        model = HYBRID.model_copy(update={"kv_heads": kv_heads, "width": 32, "ffn_width": 32})
        plan = make_plan(
            Samples.of_lengths([1000] * 8), Topology((4,)), slow, model, "joint", attention="auto", budget=50
        )
        assert all(p.parent.width == 4 for p in plan.placements)
        gathered[kv_heads] = {p.attention for p in plan.placements}
    assert gathered == {1: {"kv_gather"}, 8: {"ulysses"}}


@settings(max_examples=25, deadline=None)
@given(model=models(), seed=st.integers(0, 50), attention=st.sampled_from(["auto", "kv_gather"]))
def test_bounds_stay_below_plans_with_gathers(model, seed, attention):
    figures = evaluate(plan_of(seed, model, "joint", attention, (2, 2, 1)), CLUSTER, model)
    assert figures.bound_seconds <= figures.seconds * (1 + 1e-9)
    assert figures.plain_bound_seconds <= figures.seconds * (1 + 1e-9)


def test_a_wide_child_costs_a_linear_model_little_and_is_used_where_time_asks():
    """One document many times longer than the rest: over nodes its exchange would cost a windowed model more."""
    cluster = load_cluster("h100-8x8", {"nodes": 2, "ranks_per_node": 4, "rank_tokens_max": 65_536})
    base = ModelConfig(
        pattern="L", layers=8, width=1024, heads=16, kv_heads=16, head_dim=64, window=4096, ffn_width=1024
    )
    samples = Samples.of_lengths([131_072, *[512] * 16])
    widths, seconds = {}, {}
    for pattern in ("L", "S"):
        model = base.model_copy(update={"pattern": pattern})
        plan = make_plan(samples, Topology((4, 4)), cluster, model, "joint")
        widths[pattern] = plan.placements and max(p.child.width for r in plan.rounds for p in r.placements)
        seconds[pattern] = evaluate(plan, cluster, model)
    assert widths["L"] == 8
    sent = seconds["L"].bytes["state_gather"]
    assert sum(sent.values()) < 0.05 * sum(sum(scopes.values()) for scopes in seconds["S"].bytes.values())


def test_bytes_of_states_do_not_grow_with_tokens():
    found = set()
    for tokens in (2048, 16_384, 65_536):
        whole = Block(0, 8)
        plan = Plan((8,), (Round((Placement(0, tokens, whole, whole, tokens - 1),)),))
        figures = evaluate(plan, CLUSTER.model_copy(update={"rank_tokens_max": 65_536}), HYBRID)
        found.add(tuple(figures.bytes["state_gather"].items()))
    assert found == {(("intra", 2 * 3 * 8 * 7 * 16 * 16 * 4), ("inter", 0))}  # ways, layers, ranks, others, state


def test_an_unknown_attention_is_refused_by_name():
    with pytest.raises(RaypackError, match=r"attention = 'ring': one of .*ulysses.*kv_gather"):
        make_plan(Samples.of_lengths(np.array([8])), Topology((2,)), CLUSTER, MODEL, "static", attention="ring")
