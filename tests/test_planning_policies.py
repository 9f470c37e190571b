"""`make_plan`: legal, never worse than the policy before, the same for the same input, on any world."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.config import ModelConfig, load_cluster
from raypack.errors import RaypackError
from raypack.plan.names import POLICIES
from raypack.plan.plan_file import plan_from_json
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import BASELINES, make_plan, make_plans
from tests.planning_cases import CLUSTER, MODEL, NODES, lengths

BUDGET = 300
SMALL_HEADS = MODEL.model_copy(update={"heads": 8, "kv_heads": 4})


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(NODES),
    st.lists(st.integers(1, 2500), min_size=1, max_size=40),
    st.sampled_from(["step", "layer", "node"]),
    st.sampled_from([0, BUDGET]),
)
def test_every_policy_places_every_sample_once_and_is_no_worse_than_the_one_before(
    nodes: tuple[int, ...], given_lengths: list[int], sync: str, budget: int
) -> None:
    cluster = CLUSTER.model_copy(update={"sync": sync})
    samples, before = Samples.of_lengths(given_lengths), float("inf")
    for policy in POLICIES:
        plan = make_plan(samples, Topology(nodes), cluster, SMALL_HEADS, policy, budget=budget)
        found = evaluate(plan_from_json(plan.to_json()), cluster, SMALL_HEADS)
        assert {p.sample: p.length for p in plan.placements} == dict(enumerate(given_lengths))
        assert found.seconds <= before
        assert found.policy == policy
        before = found.seconds
        if policy in ("static", "dynamic"):
            assert all(p.parent == p.child for p in plan.placements)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(POLICIES), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(seed: int, policy: str, random) -> None:
    n = lengths(seed, 30)
    ids = np.random.default_rng(seed).permutation(10_000)[:30]
    order = np.array(random.sample(range(30), 30))
    plans = [
        make_plan(Samples(ids[at], n[at], n[at] - 1), Topology((4, 4)), CLUSTER, SMALL_HEADS, policy, budget=BUDGET)
        for at in (np.arange(30), order)
    ]
    assert plans[0].digest == plans[1].digest


SCRIPT = """
import sys
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.policies import make_plan
from tests.planning_cases import CLUSTER, MODEL, lengths

for sync in ("step", "layer"):
    cluster = CLUSTER.model_copy(update={"sync": sync})
    plan = make_plan(Samples.of_lengths(lengths(5, 60)), Topology((4, 4)), cluster, MODEL, "joint", budget=300)
    print(plan.digest.hex())
assert not {"torch", "ray"} & set(sys.modules), "planning must not import torch or ray"
"""


def test_plans_are_equal_in_processes_with_different_hash_seeds_and_need_no_torch() -> None:
    script = SCRIPT.replace("from tests.planning_cases import", "from planning_cases import")
    script = "import sys; sys.path.insert(0, 'tests')\n" + script.replace("import sys\n", "", 1)
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert len(printed) == 1
    assert len(next(iter(printed)).split()) == 2


def test_packing_keeps_the_cap_where_the_sum_alone_would_not() -> None:
    """Eight samples of 7 under a cap of 8: eight packs, though ceil(56 / 8) = 7."""
    cluster = CLUSTER.model_copy(update={"rank_tokens_max": 8})
    plan = make_plan(Samples.of_lengths([7] * 8), Topology((1,)), cluster, SMALL_HEADS, "joint")
    assert [len(r.placements) for r in plan.rounds] == [1] * 8


def test_a_step_has_the_same_rounds_on_every_rank() -> None:
    """Rounds belong to the step, not to a rank: [9, 9, 1, 1] on one rank and [3, 3] on the other make one plan."""
    cluster = CLUSTER.model_copy(update={"rank_tokens_max": 9})
    plan = make_plan(Samples.of_lengths([9, 9, 1, 1, 3, 3]), Topology((2,)), cluster, SMALL_HEADS, "joint")
    found = evaluate(plan, cluster, SMALL_HEADS)
    assert len(plan.rounds) == found.rounds == 2
    assert found.rank_tokens_max <= 9


def test_static_takes_the_least_width_that_holds_the_longest_sample_of_the_run() -> None:
    samples = Samples.of_lengths([100] * 20)
    of_step = make_plan(samples, Topology((4, 4)), CLUSTER, SMALL_HEADS, "static")
    of_run = make_plan(samples, Topology((4, 4)), CLUSTER, SMALL_HEADS, "static", longest=9000)
    assert {p.parent.width for p in of_step.placements} == {1}
    assert {p.parent.width for p in of_run.placements} == {4}


def test_static_uses_the_largest_legal_block_where_its_width_is_not_legal() -> None:
    plan = make_plan(Samples.of_lengths([500] * 30), Topology((4, 3)), CLUSTER, SMALL_HEADS, "static", longest=14_000)
    assert {tuple(p.parent) for p in plan.placements} == {(0, 4), (4, 3)}


def test_long_samples_are_spread_and_short_ones_are_not() -> None:
    samples = Samples.of_lengths([2500] + [100] * 40)
    plan = make_plan(samples, Topology((8,)), CLUSTER, SMALL_HEADS, "dynamic")
    widths = {p.sample: p.parent.width for p in plan.placements}
    assert widths[0] > 1
    assert {widths[s] for s in range(1, 41)} == {1}


def test_a_wide_parent_keeps_its_tokens_inside_a_node_where_crossing_is_dear() -> None:
    """One long sample among enough short ones: full attention over both nodes, tokens and cheap layers in one."""
    cluster = CLUSTER.model_copy(update={"rank_tokens_max": 16_384})
    samples = Samples.of_lengths([4000, *[120] * 60])
    plan = make_plan(samples, Topology((4, 4)), cluster, SMALL_HEADS, "joint")
    long = next(p for p in plan.placements if p.sample == 0)
    assert long.parent.width == 8
    assert long.child.width <= 4
    seconds = {
        policy: evaluate(
            make_plan(samples, Topology((4, 4)), cluster, SMALL_HEADS, policy), cluster, SMALL_HEADS
        ).seconds
        for policy in ("dynamic", "joint")
    }
    assert seconds["joint"] < 0.99 * seconds["dynamic"]


def test_a_sample_that_fits_nowhere_is_named_with_what_would_do() -> None:
    samples = Samples(np.array([7, 3]), np.array([50_000, 10]), np.array([0, 0]))
    for policy in POLICIES:
        with pytest.raises(RaypackError) as caught:
            make_plan(samples, Topology((4,)), CLUSTER, SMALL_HEADS, policy, budget=0)
        text = str(caught.value)
        assert "sample 7" in text
        assert "50000" in text
        assert "cap of 4096" in text
        needed = int(text.split("a cap of ")[1].split(maxsplit=1)[0])
        make_plan(samples, Topology((4,)), CLUSTER.model_copy(update={"rank_tokens_max": needed}), SMALL_HEADS, policy)
        cluster = CLUSTER.model_copy(update={"rank_tokens_max": needed - 1})
        with pytest.raises(RaypackError, match="fits no block"):
            make_plan(samples, Topology((4,)), cluster, SMALL_HEADS, policy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "best"}, "policy = 'best': must be 'static', 'dynamic'"),
        ({"budget": -1}, "budget = -1"),
        ({"recompute": "some"}, "recompute = 'some'"),
    ],
)
def test_bad_arguments_are_refused(change: dict, words: str) -> None:
    arguments = {"policy": "joint", "budget": 0, "recompute": "none", **change}
    policy = arguments.pop("policy")
    with pytest.raises(RaypackError, match=words):
        make_plan(Samples.of_lengths([5]), Topology((2,)), CLUSTER, MODEL, policy, **arguments)


@pytest.mark.parametrize(
    ("ids", "n", "labels", "words"),
    [
        ([], [], [], "there is none"),
        ([1, 2], [5, 0], [0, 0], "sample 2: length = 0"),
        ([1, 2], [5, -3], [0, 0], "sample 2: length = -3"),
        ([1, 1], [5, 5], [4, 4], "sample 1 occurs twice"),
        ([1, 2], [5, 5], [4, 6], "sample 2: labels = 6"),
        ([1, 2], [5], [4, 4], "2 ids, 1 lengths, 2 labels"),
        ([1], [2.5], [1], "integers"),
    ],
)
def test_bad_samples_are_refused(ids: list, n: list, labels: list, words: str) -> None:
    with pytest.raises(RaypackError, match=words):
        Samples(np.array(ids), np.array(n), np.array(labels))


def test_in_lockstep_parents_balance_attention_and_children_balance_tokens() -> None:
    """Every layer waits for its slowest rank: long samples need wide parents, whatever their children are."""
    cluster = CLUSTER.model_copy(update={"sync": "layer", "prefetch_layers": 0, "rank_tokens_max": 16_384})
    samples = Samples.of_lengths([3000, *[200] * 120])
    seconds = {}
    for policy in ("dynamic", "joint"):
        plan = make_plan(samples, Topology((4, 4)), cluster, SMALL_HEADS, policy, budget=0)
        seconds[policy] = evaluate(plan, cluster, SMALL_HEADS).seconds
    assert seconds["joint"] < 0.97 * seconds["dynamic"]
    assert any(p.parent.width > p.child.width for p in plan.placements)


@pytest.mark.parametrize("attention", ["ulysses", "auto", "hsap"])
def test_the_baselines_exchange_heads_and_have_no_children_whatever_attention_the_others_may_use(
    attention: str,
) -> None:
    """One document of 16,384 on two nodes of four: `static` needs one node, and sends nothing between nodes."""
    model = ModelConfig(window=256, width=64, experts=8, experts_active=2, expert_width=64, shared_expert_width=64)
    model = model.model_copy(update={"layers": 4})
    cluster = load_cluster("local-2x4")
    plans = make_plans(
        Samples.of_lengths([16_384]), Topology((4, 4)), cluster, model, "joint",
        attention=attention, longest=16_384, itemsize=4, budget=50,
    )  # fmt: skip
    assert set(plans) == {"static", "dynamic", "joint"}
    for policy in BASELINES:
        assert all(p.parent == p.child and p.attention == "ulysses" for p in plans[policy].placements)
        assert plans[policy].policy == policy
    static, dynamic = (evaluate(plans[policy], cluster, model, itemsize=4) for policy in BASELINES)
    assert static.seconds == pytest.approx(26.4206549)
    assert static.bytes_of("inter") == 0
    assert dynamic.seconds == pytest.approx(9.6115151616)
