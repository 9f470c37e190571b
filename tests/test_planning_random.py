"""Any small problem gets a plan that keeps every limit, whatever the policy and the attention, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.config import ClusterConfig, ModelConfig, load_cluster
from raypack.errors import RaypackError
from raypack.plan.names import POLICIES
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.evaluate import Evaluation, evaluate
from raypack.planning.policies import CHOICES, make_plan, repack_plan
from raypack.planning.strategy import propose, strategy_plan
from tests.planning_cases import CLUSTER, MODEL, NODES, clusters, models

# a division by nothing gives no plan that anybody wants
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

LENGTHS = st.one_of(
    st.lists(st.integers(2, 5), min_size=1, max_size=12),
    st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    st.builds(lambda n, times: [n] * times, st.integers(1, 400), st.integers(1, 12)),
)


def planned(
    lengths: list[int], nodes: tuple[int, ...], cluster: ClusterConfig, model: ModelConfig, policy: str, **options: Any
) -> Evaluation:
    """`evaluate` checks that the plan is legal and under the cap."""
    plan = make_plan(Samples.of_lengths(lengths), Topology(nodes), cluster, model, policy, **options)
    assert {p.sample: p.length for p in plan.placements} == dict(enumerate(lengths))
    found = evaluate(plan, cluster, model)
    assert 1 - 1e-9 <= found.bound_ratio < float("inf")
    return found


def refusal(make: Callable[[], Any]) -> str:
    """What the planner says where it makes no plan; "" where it makes one."""
    try:
        make()
    except RaypackError as error:
        return str(error)
    return ""


@settings(max_examples=80, deadline=None)
@given(
    LENGTHS,
    st.sampled_from([*NODES, (5,), (6,), (1, 1), (2, 1), (1, 8), (3, 3, 3), (2, 2, 2, 2)]),
    clusters(),
    st.builds(lambda model, layers: model.model_copy(update={"layers": layers}), models(), st.integers(1, 4)),
    st.sampled_from(POLICIES),
    st.sampled_from(CHOICES),
    st.sampled_from([0, 5, 30]),
    st.sampled_from([0, 2000]),
)
def test_a_problem_whose_samples_fit_gets_a_legal_plan_under_the_cap(
    given_lengths, nodes, cluster, model, policy, attention, budget, longest
) -> None:
    options = {"attention": attention, "budget": budget, "longest": longest}
    said = refusal(lambda: planned(given_lengths, nodes, cluster, model, policy, **options))
    if attention == "hsap" and len(set(nodes)) > 1:
        assert "needs nodes of equal size" in said
    else:
        assert not said or "fits no block" in said


@pytest.mark.parametrize("policy", ["repack", "joint"])
def test_children_wider_than_their_documents_weigh_nothing_in_a_layer(policy: str) -> None:
    """[3, 5] on one node of 8, one full layer: no rank is sure to hold a token, and no area is taken at all."""
    planned([3, 5], (8,), load_cluster("local-2x4", {}), ModelConfig(pattern="FSSS", layers=1), policy, budget=20)


@pytest.mark.parametrize(("policy", "pattern"), [("repack+parents", "S"), ("joint", "SL")])
def test_packs_balance_also_where_full_attention_weighs_nothing(policy: str, pattern: str) -> None:
    cluster = CLUSTER.model_copy(update={"sync": "node", "rank_tokens_max": 16})
    model = MODEL.model_copy(update={"pattern": pattern, "heads": 4, "kv_heads": 2})
    planned([30, 30, 29, 3, 4, 2, 3, 4, 5], (4,), cluster, model, policy)


@pytest.mark.parametrize(
    ("given_lengths", "nodes", "cap", "sync", "kv_heads", "policy", "attention"),
    [
        # K and V are held padded: what fits four ranks by its sum does not
        ([4, 9, 1, 9, 9, 12], (4,), 6, "layer", 1, "repack", "kv_gather"),
        # one sample a round, though by their sum it could be two
        ([325] * 7, (1, 1), 300, "layer", 7, "static", "ulysses"),
        # of two nodes a document's home would hold 29 tokens
        ([42, 23], (1, 1, 1, 1), 27, "step", 7, "repack", "hsap"),
    ],
)
def test_the_cap_is_kept(given_lengths, nodes, cap, sync, kv_heads, policy, attention) -> None:
    cluster = CLUSTER.model_copy(update={"rank_tokens_max": cap, "sync": sync})
    model = MODEL.model_copy(update={"pattern": "FS", "kv_heads": kv_heads})
    planned(given_lengths, nodes, cluster, model, policy, attention=attention, budget=0)


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.sampled_from(NODES), clusters(), models(), st.sampled_from(["repack", "repack+parents"]))
def test_strategies_and_given_packs_of_any_small_problem_keep_the_cap(given_lengths, nodes, cluster, model, policy):
    samples, topology = Samples.of_lengths(given_lengths), Topology(nodes)
    said = refusal(lambda: propose(samples.lengths, topology, cluster, model))
    assert not said or "fits no block" in said
    if said:
        return
    pool = propose(samples.lengths, topology, cluster, model)
    plan, _ = strategy_plan(samples, topology, cluster, model, pool)
    given_packs = evaluate(plan, cluster, model).seconds
    repacked = repack_plan(plan, cluster, model, policy, budget=20)
    assert evaluate(repacked, cluster, model).seconds <= given_packs * (1 + 1e-9)
