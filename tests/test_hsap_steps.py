"""hsap inside whole training steps: the invariant with every attention in one round, recompute, sharding, groups."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.config import TrainSection, load_cluster
from raypack.plan.plan import Plan, Round
from raypack.plan.topology import Topology
from raypack.planning.evaluate import evaluate
from tests.ranks import Case, gradients_on_rank, groups_made_on_rank, tiny_model
from tests.strategies import plans
from tests.test_hsap_attention import hsap
from tests.test_hsap_exchange import EVEN
from tests.test_invariant import check, gather, place
from tests.threads import calls_by_rank

pytestmark = pytest.mark.pool


def mixed(recompute: str) -> Plan:
    """Every attention beside every other: hsap over two nested parents with children of a node, of several and of one
    rank; heads exchanged over nodes; keys gathered; a second round with hsap alone."""
    first = Round(
        (
            hsap(0, 50, (0, 8), (0, 2)),
            hsap(1, 31, (0, 4), (0, 4)),
            hsap(2, 17, (4, 4), (5, 1)),
            hsap(3, 9, (0, 8), (0, 8)),
            place(4, 12, (0, 8), (6, 2)),
            gather(5, 20, (0, 4)),
            place(6, 5, (7, 1), (7, 1)),
        ),
        recompute,
    )
    second = Round((hsap(7, 40, (0, 8), (4, 2)), hsap(8, 1, (2, 2), (2, 2))), recompute)
    return Plan(nodes=(2, 2, 2, 2), rounds=(first, second))


@pytest.mark.parametrize(
    ("shard", "recompute"), [("none", "none"), ("none", "full"), ("world", "selective"), ("world", "full")]
)
def test_every_attention_in_one_round_gives_the_loss_and_gradients_of_one_rank(pool, shard, recompute):
    case = Case(tiny_model(pattern="FSF", layers=3), TrainSection(dtype="float64", shard=shard, chunk_tokens=7))
    check(pool, case, mixed(recompute))


@settings(settings.get_profile("ranks"), max_examples=8)
@given(data=st.data(), nodes=EVEN)
def test_any_plan_with_hsap_gives_the_loss_and_gradients_of_one_rank(pool, data, nodes):
    plan = data.draw(plans(Topology(nodes), gather=True, spread=True))
    if plan.labels:
        check(pool, Case(tiny_model(kv_heads=data.draw(st.sampled_from([1, 2, 4])), experts=0)), plan)


@settings(settings.get_profile("ranks"), max_examples=8)
@given(data=st.data(), nodes=EVEN)
def test_the_ledger_counts_what_the_cost_model_says_by_site_and_scope(pool, data, nodes):
    plan = data.draw(plans(Topology(nodes), spread=True))
    if not plan.labels:
        return
    case = Case(tiny_model(pattern="FS", layers=3), TrainSection(dtype="float32", chunk_tokens=9))
    cluster = load_cluster("local-2x4", {"rank_tokens_max": 10_000})
    expected = evaluate(plan, cluster, case.model, itemsize=4).bytes
    counted: dict[tuple[str, str], int] = {}
    for _, _, ledger in pool.run(plan.topology.world, gradients_on_rank, case, plan):
        for key, count in ledger["exchanged"].items():
            counted[key] = counted.get(key, 0) + count
    for site, scopes in expected.items():
        for scope, count in scopes.items():
            assert counted.pop((site, scope), 0) == count, (site, scope)
    assert not any(counted.values())


def test_hsap_makes_no_group(pool, monkeypatch):
    plans_ = [mixed("none"), mixed("none").at(1, None, None)]
    calls = calls_by_rank(monkeypatch, dist, "new_group")
    assert pool.run(8, groups_made_on_rank, Case(tiny_model()), plans_, calls) == [(7, 0)] * 8
