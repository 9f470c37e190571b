"""Training hybrids of linear and full attention: the same curve in any world and with either attention."""

from __future__ import annotations

import numpy as np
import pytest

from raypack.config import TrainSection, load_cluster
from raypack.plan.plan import Plan
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.policies import make_plan
from tests.ranks import Case, losses_on_rank, tiny_model

pytestmark = pytest.mark.pool

STEPS, STEPS_OF_EIGHT = 16, 5  # eight ranks take most of the time
MODEL = tiny_model(
    pattern="LLLF", layers=4, heads=8, kv_heads=2, width=16, experts=0, linear_decay="gate", linear_conv=4,
    linear_feature="silu", linear_chunk=8,
)  # fmt: skip
TRAIN = TrainSection(dtype="float64", chunk_tokens=64, lr=1e-2, warmup_steps=2)


def plans_for(nodes: tuple[int, ...], attention: str) -> list[Plan]:
    free = dict.fromkeys(["round_seconds", "launch_seconds", "intra_latency", "inter_latency"], 0.0)
    rates = {"attention_share": 0.01, "intra_rate": 2e10, "inter_rate": 4e9, "rank_tokens_max": 100_000}
    cluster = load_cluster("local-2x4", {**free, **rates})
    draw = np.random.default_rng(11)
    steps = [Samples.of_lengths([200, *draw.integers(5, 60, size=8).tolist()]) for _ in range(STEPS)]
    made = [
        make_plan(s, Topology(nodes), cluster, MODEL, "joint", attention=attention, itemsize=4, budget=20)
        for s in steps
    ]
    return [plan.at(i, None, None) for i, plan in enumerate(made)]


def test_loss_curves_are_equal_on_1_2_4_and_8_ranks_and_fall(pool):
    """fp64: in fp32 Adam turns the rounding of gradients that are nearly 0 into steps of full size, and curves part."""
    curves = {}
    for nodes, attention in (((1,), "auto"), ((2,), "kv_gather"), ((2, 2), "ulysses"), ((4, 4), "kv_gather")):
        plans = plans_for(nodes, attention)[: STEPS_OF_EIGHT if sum(nodes) == 8 else STEPS]
        if sum(nodes) > 1:
            assert any(p.child.width > 1 for plan in plans for p in plan.placements)
            assert any(p.attention == "kv_gather" for plan in plans for p in plan.placements) == (
                attention == "kv_gather"
            )
        results = pool.run(sum(nodes), losses_on_rank, Case(MODEL, TRAIN), plans, STEPS)
        curves[nodes] = results[0][0]
        for losses, weights in results:
            assert losses == results[0][0]
            assert all(np.array_equal(weights[n], results[0][1][n]) for n in weights)
    for nodes, curve in curves.items():
        assert curve == pytest.approx(curves[1,][: len(curve)], rel=1e-8), nodes
    assert np.mean(curves[1,][-4:]) < np.mean(curves[1,][:4]) - 0.1
