"""Properties of whole steps over several ranks: causality, routing, skipped steps, agreement, groups, policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.config import TrainSection, load_cluster
from raypack.plan.names import POLICIES
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.samples import Samples
from raypack.plan.topology import Block, Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import make_plan
from tests.ranks import (
    Case,
    disagreeing_on_rank,
    gradients_on_rank,
    groups_made_on_rank,
    hidden_on_rank,
    losses_on_rank,
    routed_gradients_on_rank,
    stepping_on_rank,
    tiny_model,
)
from tests.strategies import NODES, plans
from tests.threads import calls_by_rank

pytestmark = pytest.mark.pool


def place(sample, length, parent, child):
    return Placement(sample, length, Block(*parent), Block(*child), length - 1)


REPACKED = Plan(
    nodes=(2, 2),
    rounds=(
        Round((place(0, 30, (0, 4), (0, 2)), place(1, 11, (0, 4), (3, 1)), place(2, 4, (1, 1), (1, 1)))),
        Round((place(3, 17, (2, 2), (2, 2)),)),
    ),
)
WORLD_OF_ONE = Plan(
    nodes=(1,), rounds=(Round(tuple(p._replace(parent=Block(0, 1), child=Block(0, 1)) for p in REPACKED.placements)),)
)


GATHERED = Plan(
    nodes=(2, 2),
    rounds=tuple(
        Round(tuple(p._replace(parent=p.child, attention="kv_gather") for p in r.placements)) for r in REPACKED.rounds
    ),
)


@pytest.mark.parametrize(
    ("pattern", "plan"),
    [("F", REPACKED), ("F", GATHERED), ("S", REPACKED), ("FS", REPACKED), ("L", REPACKED), ("LF", GATHERED)],
)
@pytest.mark.parametrize("change", [(0, 13), (1, 0), (3, 16)])
def test_changing_a_token_leaves_everything_before_it_and_every_other_document_alone(pool, pattern, plan, change):
    linear = {"linear_decay": "gate", "linear_conv": 4, "linear_chunk": 4}
    # A token that goes to another expert changes the shape, and so the rounding, of the products of its neighbours.
    case = Case(tiny_model(pattern=pattern, layers=2, sinks=1, experts=0 if "L" in pattern else 4, **linear))
    before, after = {}, {}
    for rank_before in pool.run(4, hidden_on_rank, case, plan, None):
        before.update(rank_before)
    for rank_after in pool.run(4, hidden_on_rank, case, plan, change):
        after.update(rank_after)
    assert len(before) == plan.tokens
    for (sample, position), state in before.items():
        same = np.array_equal(state, after[sample, position])
        if sample != change[0] or position < change[1]:
            assert same, (sample, position)
    assert not np.array_equal(before[change], after[change])


@settings(settings.get_profile("ranks"), max_examples=12)
@given(data=st.data())
def test_the_ledger_counts_what_the_cost_model_says_by_site_and_scope(pool, data):
    topology = Topology(data.draw(NODES))
    plan = data.draw(plans(topology))
    if plan.labels == 0:
        return
    case = Case(tiny_model(pattern="FS", layers=3), TrainSection(dtype="float32", chunk_tokens=9))
    cluster = load_cluster("local-2x4", {"rank_tokens_max": 10_000})
    expected = evaluate(plan, cluster, case.model, itemsize=4).bytes
    counted: dict[tuple[str, str], int] = {}
    for _, _, ledger in pool.run(topology.world, gradients_on_rank, case, plan):
        for key, count in ledger["exchanged"].items():
            counted[key] = counted.get(key, 0) + count
    for site, scopes in expected.items():
        for scope, count in scopes.items():
            assert counted.pop((site, scope), 0) == count, (site, scope)
    assert not any(counted.values())


def test_fp32_with_saved_routing_agrees_to_1e_5_and_with_free_routing_in_the_loss(pool):
    case = Case(tiny_model(layers=3), TrainSection(dtype="float32", chunk_tokens=16))
    ((loss, grads, chosen),) = pool.run(1, routed_gradients_on_rank, case, WORLD_OF_ONE, None)
    for got, seen, _ in pool.run(4, routed_gradients_on_rank, case, REPACKED, chosen):
        for name, expected in grads.items():
            assert np.abs(seen[name] - expected).max() <= 1e-5 * max(1e-2, np.abs(expected).max()), name
        assert got <= loss * (1 + 1e-5)  # a rank's own part
    results = pool.run(4, routed_gradients_on_rank, case, REPACKED, None)
    assert sum(r[0] for r in results) == pytest.approx(loss, rel=1e-5)
    free = {key: experts for r in results for key, experts in r[2].items()}
    flips = sum(free[key] != experts for key, experts in chosen.items())
    assert len(free) == len(chosen)
    assert flips <= 0.01 * len(chosen), f"{flips} of {len(chosen)} tokens chose other experts"


def test_a_step_without_any_label_is_skipped_and_the_next_goes_on(pool):
    empty = Plan(nodes=(2, 2), rounds=(Round((place(9, 8, (0, 4), (0, 4))._replace(labels=0),)),))
    results = pool.run(4, stepping_on_rank, Case(tiny_model(), masked=(9,)), [empty, REPACKED.at(1, None, None)], None)
    for (loss, applied, _, same), (later, applied_later, _, _) in results:
        assert (loss, applied, same) == (0.0, False, True)
        assert applied_later
        assert later > 0


@pytest.mark.parametrize("plan", [REPACKED, WORLD_OF_ONE])
@pytest.mark.parametrize(("counted", "held"), [(55, 58), (58, 55)])
def test_labels_that_the_plan_does_not_count_are_the_error_of_all_before_the_step(pool, plan, counted, held):
    """Sample 2 has three labels: the plan counts none of them, or counts what its rows don't carry."""
    first, *others = plan.rounds
    uncounted = tuple(p._replace(labels=0) if p.sample == 2 else p for p in first.placements)
    given_plan = plan if counted == 58 else Plan(nodes=plan.nodes, rounds=(Round(uncounted), *others))
    world = plan.topology.world
    case = Case(tiny_model(), masked=(2,) if held == 55 else ())
    texts = pool.run(world, disagreeing_on_rank, case, [[given_plan]] * world, {})
    assert len(set(texts)) == 1
    assert f"the plan counts {counted} labels, but all ranks together hold {held}: " in texts[0]


def test_no_group_is_made_after_the_start(pool, monkeypatch):
    case = Case(tiny_model())
    plans_ = [REPACKED, REPACKED.at(1, None, None)]
    calls = calls_by_rank(monkeypatch, dist, "new_group")
    assert pool.run(4, groups_made_on_rank, case, plans_, calls) == [(3, 0)] * 4  # {0..3}, {0, 1}, {2, 3}


def repacked_by_hand(samples: Samples) -> Plan:
    """The longest in a parent of 4 over both nodes with a child of 2, the next ones in the same parent with children
    of 1, and a second round of short ones at home."""
    rows = list(zip(samples.ids.tolist(), samples.lengths.tolist(), strict=True))
    first = [place(*rows[0], (0, 4), (0, 2))]
    first += [place(i, n, (0, 4), (2 + k % 2, 1)) for k, (i, n) in enumerate(rows[1:5])]
    second = [place(i, n, (k, 1), (k, 1)) for k, (i, n) in enumerate(rows[5:])]
    return Plan(nodes=(2, 2), rounds=(Round(tuple(first)), Round(tuple(second))))


def test_every_policy_gives_the_same_loss_curve(pool):
    """fp32, 8 steps, through the job's own step; weights bit-equal on all ranks at the end."""
    model = tiny_model(pattern="FSSS", layers=4, heads=8, kv_heads=4, width=16, window=8)
    train = TrainSection(dtype="float32", chunk_tokens=64, lr=1e-2, warmup_steps=2)
    free = dict.fromkeys(["round_seconds", "launch_seconds", "intra_latency", "inter_latency"], 0.0)
    rates = {"attention_share": 0.01, "intra_rate": 2e10, "inter_rate": 4e8, "rank_tokens_max": 120}
    cluster = load_cluster("local-2x2", {**free, **rates})
    rng = np.random.default_rng(5)
    steps = [Samples.of_lengths([200, *rng.integers(5, 60, size=8).tolist()]) for _ in range(8)]
    curves, widths = {}, {}
    for policy in (*POLICIES, "by hand"):
        made = [
            repacked_by_hand(s)
            if policy == "by hand"
            else make_plan(s, Topology((2, 2)), cluster, model, policy, longest=200, itemsize=4, budget=20)
            for s in steps
        ]
        made = [plan.at(i, None, None) for i, plan in enumerate(made)]
        widths[policy] = {(p.parent.width, p.child.width) for plan in made for p in plan.placements}
        results = pool.run(4, losses_on_rank, Case(model, train), made)
        curves[policy] = results[0][0]
        for losses, weights in results:
            assert losses == results[0][0]
            assert all(np.array_equal(weights[n], results[0][1][n]) for n in weights)
    for policy, curve in curves.items():
        assert curve == pytest.approx(curves["static"], rel=1e-4), policy
        assert curve[-1] < curve[0]
    assert any(parent != child for parent, child in widths["joint"])
    assert len({parent for parent, _ in widths["dynamic"]}) > 1
