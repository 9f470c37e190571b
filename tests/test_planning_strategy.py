"""Strategies: the pool, dispatch and packing, and what happens where the pool does not reach."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.errors import RaypackError
from raypack.layers.costs import Costs
from raypack.plan.plan import check_plan
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.problem import Problem
from raypack.planning.strategy import Strategy, blocks_of, propose, strategy_plan, strategy_table
from tests.planning_cases import CLUSTER, MODEL, NODES, lengths

HEADS = MODEL.model_copy(update={"heads": 8, "kv_heads": 4})


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(NODES))
def test_every_strategy_is_groups_side_by_side_and_the_pool_reaches_the_longest(
    seed: int, nodes: tuple[int, ...]
) -> None:
    topology, n = Topology(nodes), lengths(seed, 200, 3000)
    pool = propose(n, topology, CLUSTER, HEADS, step_tokens=20_000)
    for strategy in pool:
        blocks = blocks_of(topology, strategy.widths)
        assert blocks is not None
        assert sum(strategy.widths) <= topology.world
        assert len({r for b in blocks for r in range(b.first, b.end)}) == sum(strategy.widths)
    assert max(strategy.longest for strategy in pool) == n.max()
    assert len({(s.widths, s.recompute) for s in pool}) == len(pool)


def test_long_steps_get_wide_groups_and_a_mass_of_short_samples_does_not() -> None:
    topology = Topology((4, 4))
    mixed = np.concatenate([lengths(1, 300, 400), [3900]])
    one_step = propose(mixed[-20:], topology, CLUSTER, HEADS)
    assert max(max(s.widths) for s in one_step if s.longest == 3900) >= 4
    short = propose(lengths(1, 300, 60), topology, CLUSTER, HEADS)
    assert min(max(s.widths) for s in short) == 1


def test_the_dynamic_program_finds_the_best_split_of_two_length_classes() -> None:
    """Brute force over all multisets of widths on 4 ranks: the pool's best is theirs, in the fluid sense."""
    topology = Topology((4,))
    n = np.array([3000, 200, 200, 200, 200, 200, 200])
    samples = Samples.of_lengths(n)
    pool = propose(n, topology, CLUSTER, HEADS)
    plan, chosen = strategy_plan(samples, topology, CLUSTER, HEADS, pool)
    seconds = []
    problem = Problem(samples.canonical(), topology, Costs(HEADS, CLUSTER), "step", 0, "none", 0)
    for widths in {tuple(sorted(w, reverse=True)) for k in (1, 2, 3, 4) for w in product((1, 2, 4), repeat=k)}:
        if sum(widths) <= 4:
            table = strategy_table(problem, Strategy(widths, "none", 3000))
            assert table is not None
            seconds.append(problem.judge(table))
    assert evaluate(plan, CLUSTER, HEADS).seconds <= min(seconds) * 1.05
    assert chosen in pool


def test_the_strategy_with_the_least_makespan_wins_not_the_one_with_fewest_groups() -> None:
    """Two strategies, one slow group against two quick ones: costs decide, not counts (a public planner had it so)."""
    topology = Topology((4,))
    samples = Samples.of_lengths([150] * 40)
    pool = (Strategy((4,), "none", 150), Strategy((1, 1, 1, 1), "none", 150))
    for order in (pool, pool[::-1]):
        plan, chosen = strategy_plan(samples, topology, CLUSTER, HEADS, order)
        assert chosen.widths == (1, 1, 1, 1)
        check_plan(plan)
        assert {p.parent.width for p in plan.placements} == {1}


def test_packing_keeps_the_linear_cap_in_every_round() -> None:
    cluster = CLUSTER.model_copy(update={"rank_tokens_max": 1000})
    samples = Samples.of_lengths([700] * 12 + [1800])
    plan, _ = strategy_plan(samples, Topology((4,)), cluster, HEADS, (Strategy((2, 1, 1), "none", 1800),))
    assert evaluate(plan, cluster, HEADS).rank_tokens_max <= 1000
    assert len(plan.rounds) > 1
    assert plan.policy == "strategy"
    assert next(p for p in plan.placements if p.length == 1800).parent.width == 2


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recompute_is_a_choice_where_it_has_a_cap_of_its_own(how: str) -> None:
    cap = f"rank_tokens_max_{how}"
    roomy = CLUSTER.model_copy(update={"rank_tokens_max": 1000, cap: 8000})
    n = np.array([3500, 200, 200, 200])
    pool = propose(n, Topology((2,)), roomy, HEADS)
    assert {s.recompute for s in pool if s.longest == 3500} == {how}
    plan, chosen = strategy_plan(Samples.of_lengths(n), Topology((2,)), roomy, HEADS, pool)
    assert chosen.recompute == how
    assert {r.recompute for r in plan.rounds} == {how}
    found = evaluate(plan, roomy, HEADS)
    assert found.bound_seconds <= found.seconds
    with pytest.raises(RaypackError, match="length = 3500 fits no block"):
        propose(n, Topology((2,)), roomy.model_copy(update={cap: 0}), HEADS)


def test_a_sample_beyond_the_pool_is_named() -> None:
    pool = (Strategy((1, 1), "none", 400),)
    with pytest.raises(RaypackError, match="sample of 6000 tokens: no strategy of the pool holds it"):
        strategy_plan(Samples.of_lengths([6000]), Topology((2,)), CLUSTER, HEADS, pool)
