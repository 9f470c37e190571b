"""The choice of hsap: forced, free, refused."""

from __future__ import annotations

import numpy as np
import pytest

from raypack.config import ClusterConfig, ModelConfig
from raypack.errors import RaypackError
from raypack.plan.plan import Plan, check_plan
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import make_plan
from tests.planning_cases import CLUSTER, MODEL, lengths

EVEN = Topology((4, 4))
FEW_HEADS = MODEL.model_copy(update={"heads": 4, "kv_heads": 4, "pattern": "F"})


def planned(attention: str, model: ModelConfig = FEW_HEADS, topology: Topology = EVEN, **cluster) -> tuple[Plan, float]:
    machine: ClusterConfig = CLUSTER.model_copy(update={"inter_rate": 2e9, **cluster})
    sizes = np.append(lengths(3, 12, 300), 4000)
    plan = make_plan(Samples.of_lengths(sizes), topology, machine, model, "joint", attention=attention, budget=200)
    check_plan(plan)
    return plan, evaluate(plan, machine, model).seconds


def attentions(plan: Plan) -> set[tuple[int, str]]:
    return {(p.parent.width, p.attention) for p in plan.placements}


def test_auto_goes_beyond_the_head_count_where_that_is_quicker() -> None:
    """4 heads: by heads no parent is wider than 4; the long sample takes both nodes with hsap, no short one."""
    plain, slow = planned("ulysses")
    free, quick = planned("auto")
    assert max(p.parent.width for p in plain.placements) == 4
    assert {(p.sample, p.parent.width) for p in free.placements if p.attention == "hsap"} == {(12, 8)}
    assert quick < 0.75 * slow


@pytest.mark.parametrize("inter_rate", [1e6, 1e8, 1e10])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (12, 3)])
def test_auto_is_never_slower_than_ulysses(heads: tuple[int, int], inter_rate: float) -> None:
    model = MODEL.model_copy(update={"heads": heads[0], "kv_heads": heads[1]})
    assert planned("auto", model, inter_rate=inter_rate)[1] <= planned("ulysses", model, inter_rate=inter_rate)[1]


def test_forced_every_parent_over_nodes_is_hsap() -> None:
    model = MODEL.model_copy(update={"heads": 16, "kv_heads": 2})
    plan, _ = planned("hsap", model)
    assert (8, "hsap") in attentions(plan)
    assert all((p.attention == "hsap") == (p.parent.width > 4) for p in plan.placements)


def test_forced_on_unequal_nodes_is_refused_and_free_is_no_candidate() -> None:
    uneven = Topology((4, 3))
    with pytest.raises(RaypackError, match=r"node 0 has 4 ranks, node 1 has 3 ranks; use auto or ulysses"):
        planned("hsap", topology=uneven)
    plan, _ = planned("auto", topology=uneven)
    assert "hsap" not in {p.attention for p in plan.placements}


def test_the_choice_does_not_depend_on_the_order_of_the_samples() -> None:
    sizes = np.append(lengths(3, 12, 300), 4000)
    order = np.random.default_rng(0).permutation(len(sizes))
    machine = CLUSTER.model_copy(update={"inter_rate": 2e9})
    made = [
        make_plan(samples, EVEN, machine, FEW_HEADS, "joint", attention="auto", budget=50)
        for samples in (Samples.of_lengths(sizes), Samples(order, sizes[order], sizes[order] - 1))
    ]
    assert made[0] == made[1]
