"""The invariant (docs/exchange.md): any plan, world, number of rounds and sharding gives the same loss and gradients
as one rank without parallelism. fp64, every parameter, every rank, NaN-poisoned receive buffers.

Ranks are threads but for the last two tests: processes, which cannot share by accident."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.config import TrainSection
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block, Topology
from tests.planned import planned
from tests.ranks import Case, compared_on_rank, gradients_on_rank, oracle, tiny_model
from tests.strategies import NODES, plans

pytestmark = pytest.mark.pool

MODELS = st.builds(
    tiny_model,
    pattern=st.sampled_from(["FS", "SF", "FSS", "F", "S", "L", "LF", "LLF", "SLF"]),
    layers=st.integers(1, 3),
    heads=st.sampled_from([4, 6]),
    kv_heads=st.sampled_from([1, 2]),
    window=st.sampled_from([1, 4, 9, 100]),
    sinks=st.sampled_from([0, 0, 2]),
    linear_decay=st.sampled_from(["none", "head", "gate"]),
    linear_feature=st.sampled_from(["none", "relu", "elu", "silu"]),
    linear_norm=st.booleans(),
    linear_conv=st.sampled_from([0, 2, 4]),
    linear_chunk=st.sampled_from([2, 8]),
    experts=st.sampled_from([0, 4]),
    shared_expert_width=st.sampled_from([0, 5]),
    tied_head=st.booleans(),
    qk_norm=st.booleans(),
)
TRAIN = st.builds(
    TrainSection,
    dtype=st.just("float64"),
    shard=st.sampled_from(["none", "world"]),
    chunk_tokens=st.sampled_from([3, 1000]),
)


def check(pool, case: Case, plan: Plan, tolerance: float = 1e-10) -> list[dict]:
    loss, grads = oracle(case, plan)
    results = pool.run(plan.topology.world, gradients_on_rank, case, plan)
    for got, seen, _ in results:
        assert got == pytest.approx(loss, rel=tolerance)
        assert seen.keys() == grads.keys()
        for name, expected in grads.items():
            scale = max(1e-3, np.abs(expected).max())
            assert np.abs(seen[name] - expected).max() <= tolerance * scale, name
            assert np.array_equal(seen[name], results[0][1][name]), f"{name} differs between ranks"
    return [ledger for _, _, ledger in results]


@settings(settings.get_profile("ranks"))
@given(data=st.data())
def test_any_plan_in_any_world_gives_the_loss_and_gradients_of_one_rank(pool, data):
    topology = Topology(data.draw(NODES))
    plan = data.draw(plans(topology, gather=data.draw(st.booleans()), spread=data.draw(st.booleans())))
    if plan.labels == 0:
        return
    check(pool, Case(data.draw(MODELS), data.draw(TRAIN)), plan)


def check_all(pool, cases: list[tuple[Case, Plan]], tolerance: float = 1e-10) -> None:
    """As `check`, for plans of one topology in one call of the pool."""
    results = pool.run(cases[0][1].topology.world, compared_on_rank, cases, timeout=240.0)
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        digests, errors = zip(*of_ranks, strict=True)
        assert [error <= tolerance for error in errors if error is not None] == [True], (errors, case)
        assert len(set(digests)) == 1, case


ALL, SOME = slice(None), slice(None, None, 3)


@pytest.mark.parametrize(
    ("nodes", "which"),
    [
        *(((1,), SOME), ((1, 1), ALL), ((2, 1), ALL), ((2, 2), ALL)),
        *(((1, 1, 1, 2), SOME), ((3, 3), SOME), ((4, 3), SOME), ((4, 4), SOME), ((5, 4), SOME), ((3, 3, 3), SOME)),
    ],
)
def test_plans_of_the_planner_give_the_loss_and_gradients_of_one_rank(pool, nodes, which):
    """Every policy with every attention; documents longer than the window."""
    check_all(pool, planned(nodes, seed=0)[which])


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (1, 1, 1), (3, 1), (3, 3), (2, 2, 2, 2), (9,), (5, 4), (1,) * 9])
def test_many_plans_of_the_planner_give_the_loss_and_gradients_of_one_rank(pool, nodes):
    for seed in range(1, 5):
        check_all(pool, planned(nodes, seed))


def place(sample, length, parent, child):
    return Placement(sample, length, Block(*parent), Block(*child), length - 1)


def gather(sample, length, block):
    return place(sample, length, block, block)._replace(attention="kv_gather")


@pytest.mark.parametrize("shard", ["none", "world"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_repacking_with_nested_children_several_rounds_and_recompute(pool, shard, recompute):
    """Parents of 8 over two nodes, children of 1, 2 and 4 nested in each other, a short sample that stays at home."""
    first = Round(
        (
            place(0, 50, (0, 8), (0, 4)),
            place(1, 31, (0, 8), (0, 2)),
            place(2, 17, (0, 8), (5, 1)),
            place(3, 9, (4, 4), (4, 2)),
            place(4, 5, (7, 1), (7, 1)),
        ),
        recompute,
    )
    second = Round((place(5, 40, (0, 8), (0, 8)), place(6, 3, (0, 4), (2, 1))), recompute)
    plan = Plan(nodes=(4, 4), rounds=(first, second))
    case = Case(tiny_model(pattern="FSSS", layers=4), TrainSection(dtype="float64", shard=shard, chunk_tokens=7))
    check(pool, case, plan)


@pytest.mark.parametrize(
    ("shard", "recompute", "decay"),
    [("none", "none", "head"), ("none", "full", "gate"), ("world", "selective", "gate"), ("world", "full", "head")],
)
def test_linear_layers_and_gathered_keys_with_nested_blocks_and_recompute(pool, shard, recompute, decay):
    """One round with both attentions, blocks of 8, 4 and 2 nested in each other, documents over many ranks."""
    first = Round(
        (
            gather(0, 50, (0, 8)),
            place(1, 31, (0, 8), (0, 4)),
            place(2, 17, (0, 8), (5, 1)),
            gather(3, 9, (4, 4)),
            gather(4, 4, (4, 4)),
            place(5, 6, (4, 4), (4, 4)),
            gather(6, 7, (0, 2)),
            place(7, 5, (7, 1), (7, 1)),
        ),
        recompute,
    )
    second = Round((gather(8, 40, (0, 8)), place(9, 3, (0, 4), (2, 1))), recompute)
    plan = Plan(nodes=(4, 4), rounds=(first, second))
    model = tiny_model(
        pattern="LLLF", layers=4, linear_decay=decay, linear_conv=4, linear_feature="silu", linear_chunk=4
    )
    check(pool, Case(model, TrainSection(dtype="float64", shard=shard, chunk_tokens=7)), plan)


def test_windows_hold_whatever_full_layers_exchange(pool):
    """Equal parents and children: S layers may share the exchange of F layers with heads, never that of hsap."""
    model, both = tiny_model(window=3, experts=0), Block(0, 2)
    for attention in ("ulysses", "kv_gather", "hsap"):
        plan = Plan(nodes=(1, 1), rounds=(Round((Placement(0, 17, both, both, 16, attention),)),))
        right, _ = oracle(Case(model), plan)
        for loss, _, _ in pool.run(2, gradients_on_rank, Case(model), plan):
            assert loss == pytest.approx(right, rel=1e-12), attention


def test_more_ranks_than_heads_and_empty_ranks(pool):
    plan = Plan(nodes=(9,), rounds=(Round((place(0, 4, (0, 9), (0, 1)), place(1, 2, (0, 9), (0, 9)))),))
    check(pool, Case(tiny_model(heads=3, kv_heads=1, layers=3)), plan)


def test_samples_without_labels_neither_poison_nor_count(pool):
    placements = (
        place(0, 6, (0, 1), (0, 1)),
        Placement(1, 6, Block(1, 1), Block(1, 1), 0),
    )
    plan = Plan(nodes=(2,), rounds=(Round(placements),))
    check(pool, Case(tiny_model(), masked=(1,)), plan)


def test_fp32_agrees_to_1e_5(pool):
    plan = Plan(nodes=(4,), rounds=(Round((place(0, 60, (0, 4), (0, 2)), place(1, 20, (0, 4), (2, 1)))),))
    case = Case(tiny_model(experts=0), TrainSection(dtype="float32", chunk_tokens=16))
    loss, grads = oracle(case, plan)
    for got, seen, _ in pool.run(4, gradients_on_rank, case, plan):
        assert got == pytest.approx(loss, rel=1e-5)
        for name, expected in grads.items():
            assert np.abs(seen[name] - expected).max() <= 1e-5 * max(1e-2, np.abs(expected).max()), name


@pytest.mark.parametrize("shard", ["none", "world"])
def test_ranks_that_are_processes_give_the_same(processes, shard):
    first = Round((gather(0, 30, (0, 4)), place(1, 21, (0, 4), (0, 2)), place(2, 9, (0, 4), (3, 1))), "full")
    second = Round((place(3, 17, (2, 2), (2, 2)), place(4, 5, (1, 1), (1, 1))))
    model = tiny_model(pattern="LFS", layers=3, linear_decay="gate", linear_conv=4, linear_chunk=4, sinks=1)
    case = Case(model, TrainSection(dtype="float64", shard=shard, chunk_tokens=7))
    check(processes, case, Plan(nodes=(2, 2), rounds=(first, second)))


@pytest.mark.rest
@settings(settings.get_profile("ranks"), max_examples=12)
@given(data=st.data(), nodes=st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 1, 2), (3, 3)]))
def test_any_plan_on_processes_gives_the_loss_and_gradients_of_one_rank(processes, data, nodes):
    plan = data.draw(plans(Topology(nodes), gather=True, spread=True))
    if plan.labels:
        check(processes, Case(data.draw(MODELS), data.draw(TRAIN)), plan)
