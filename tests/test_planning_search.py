"""The local search's view of the cost: priced candidates, floors, and the exact optimum of tiny problems."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raypack.config import load_cluster, load_model
from raypack.layers.costs import Costs
from raypack.plan.plan import Placement, Plan, Round, check_plan
from raypack.plan.samples import Samples
from raypack.plan.table import table_of
from raypack.plan.topology import Block, Topology
from raypack.planning.greedy import even_out, first_fit, list_schedule
from raypack.planning.load import load_rounds
from raypack.planning.policies import DEFAULT_BUDGET, best_table, make_plan, repack_plan
from raypack.planning.problem import Problem
from raypack.planning.search.draft import Draft
from raypack.planning.search.exact import Places
from raypack.planning.search.few import improve_few
from raypack.planning.search.neighbours import Candidates, objective, values
from raypack.planning.search.profiles import CHEAP, FULL
from raypack.planning.search.rules import places
from tests.planning_cases import CLUSTER, MODEL, NODES, lengths
from tests.planning_oracle import even_seconds, solve

FREE = CLUSTER.model_copy(update={"launch_seconds": 0.0})
HEADS = MODEL.model_copy(update={"heads": 8, "kv_heads": 4})


def problem_of(n: np.ndarray, nodes: tuple[int, ...], *, budget: int = 0, model=HEADS, **changes: object) -> Problem:
    cluster = FREE.model_copy(update=changes)
    samples = Samples.of_lengths(n).canonical()
    return Problem(samples, Topology(nodes), Costs(model, cluster), cluster.sync, 0, "none", budget)


def random_state(problem: Problem, rng: np.random.Generator, rounds: int) -> Draft:
    draft = Draft(problem, rounds)
    every = places(draft, tuple(range(len(problem.shapes))))
    for sample in range(len(problem.lengths)):
        draft.put(sample, every.at(int(rng.integers(len(every)))))
    return draft


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(NODES),
    st.sampled_from(["step", "layer", "node"]),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_a_priced_candidate_is_what_it_costs_to_go_there(
    seed: int, nodes: tuple[int, ...], sync: str, prefetch: int, tight: bool
) -> None:
    rng = np.random.default_rng(seed)
    problem = problem_of(
        lengths(seed, int(rng.integers(2, 9)), 2000),
        nodes,
        sync=sync,
        prefetch_layers=prefetch,
        rank_tokens_max=1500 if tight else 100_000,
    )
    draft = random_state(problem, rng, 3)
    sample = int(rng.integers(len(problem.lengths)))
    home = draft.take(sample)
    assume(np.isfinite(objective(draft)))
    every = places(draft, tuple(range(len(problem.shapes))))
    some = every.select(rng.permutation(len(every))[:25])
    priced = values(draft, sample, some).objective
    for at, price in enumerate(priced.tolist()):
        draft.put(sample, some.at(at))
        assert objective(draft) == pytest.approx(price, rel=1e-9)
        draft.take(sample)
    draft.put(sample, home)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(NODES))
def test_taking_samples_out_and_putting_them_back_changes_nothing(seed: int, nodes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    draft = random_state(problem_of(lengths(seed, 6), nodes), rng, 2)
    loads, value = draft.loads.copy(), objective(draft)
    for sample in rng.permutation(6).tolist():
        draft.put(sample, draft.take(sample))
    np.testing.assert_allclose(draft.loads, loads, atol=1e-9)
    assert objective(draft) == pytest.approx(value)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(NODES), st.integers(1, 4), st.integers(1, 3))
def test_the_searchs_loads_are_those_of_the_cost_model(
    seed: int, nodes: tuple[int, ...], kv_heads: int, per: int
) -> None:
    """For one sample alone, whose tokens divide evenly, both views must agree rank by rank."""
    model = MODEL.model_copy(update={"heads": kv_heads * per, "kv_heads": kv_heads})
    rng = np.random.default_rng(seed)
    problem = problem_of(np.array([5040]), nodes, model=model, rank_tokens_max=100_000)
    draft = random_state(problem, rng, 1)
    load = load_rounds(draft.table(), problem.topology, problem.costs)[0]
    costs = problem.costs
    full, sparse = load.of("F"), load.of("S")
    layers = {layer.kind.letter: layer.count for layer in costs.layers}
    np.testing.assert_allclose(draft.loads[0, FULL], layers["F"] * full.compute, rtol=1e-9)
    cheap = layers["S"] * (sparse.compute + sparse.exchange) + len(costs.model.kinds) * load.linear
    np.testing.assert_allclose(draft.loads[0, CHEAP], cheap, rtol=1e-9)
    packs = draft.packs(0)
    exchange = layers["F"] * (full.exchange.max() + full.latency.max())
    assert packs.exchange.max() <= exchange * (1 + 1e-9)


def test_the_planner_finds_the_proven_optimum_of_tiny_problems() -> None:
    proven = 0
    for seed, nodes, count in ((0, (4,), 3), (1, (2, 2), 4), (2, (4, 4), 3), (3, (3, 2), 4)):
        n = lengths(seed, count, 4000)
        problem = problem_of(n, nodes, budget=6000)
        table = best_table(problem, "joint")
        optimum = solve(problem, 2, 6.0, table)
        assert problem.judge(table) <= problem.judge(optimum.table) * (1 + 1e-6)
        if optimum.proven:
            proven += 1
            assert problem.bounds.area <= optimum.seconds * (1 + 1e-5)
    assert proven >= 2


# Steps on two nodes of four where a search that knew no sums of exchanges stopped short, and CP-SAT's plans: of
# every sample round, first rank and width of the parent, first rank and width of the child.
MISSED = {
    (8790, 8039, 7220, 2702): ((0, 0, 4, 0, 4), (0, 0, 8, 0, 8), (0, 4, 4, 4, 4), (0, 4, 4, 4, 4)),
    (3183, 1918, 1747, 1584, 1530, 1398): (
        (0, 0, 4, 0, 4),
        (0, 0, 4, 0, 4),
        (1, 7, 1, 7, 1),
        (1, 4, 2, 4, 1),
        (1, 5, 1, 5, 1),
        (1, 6, 1, 6, 1),
    ),
}


@pytest.mark.parametrize("n", list(MISSED))
def test_few_samples_get_a_plan_as_good_as_the_solvers(n: tuple[int, ...]) -> None:
    share = 400e12 / 989e12
    cluster = load_cluster("h100-8x8", {"matmul_share": share, "attention_share": share})
    costs = Costs(load_model("1f3s-30b-a3b"), cluster)
    samples = Samples.of_lengths(np.array(n)).canonical()
    problem = Problem(samples, Topology((4, 4)), costs, "step", 0, "none", DEFAULT_BUDGET)
    solved = problem.judge(problem.table(*np.array(MISSED[n]).T))
    assert problem.judge(best_table(problem, "joint")) <= solved * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([n for n in NODES if sum(n) > 1]), st.sampled_from([0.0, 1e-4]))
def test_whole_plans_are_priced_as_they_are_judged(seed: int, nodes: tuple[int, ...], launch: float) -> None:
    """Lengths that divide evenly and one child for each rank and parent, so that no sample shares another's shard."""
    rng = np.random.default_rng(seed)
    n = 5040 * rng.integers(1, 4, 4)
    problem = problem_of(n, nodes, rank_tokens_max=1_000_000, launch_seconds=launch, round_seconds=1e-3)
    places = Places(problem)
    equal = np.flatnonzero(places.parent == places.child)
    number, place = rng.integers(0, 2, 4), rng.choice(equal, 4)
    plans = places.empty(2)
    for sample in range(4):
        plans = places.put(plans, sample, number[sample : sample + 1], place[sample : sample + 1])
    table = places.table(number, place)
    assert places.of(table).tolist() == place.tolist()
    assert places.price(plans).seconds[0] == pytest.approx(problem.judge(table), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(NODES), st.integers(1, 2000))
def test_the_search_of_few_samples_stays_legal_and_never_loses(seed: int, nodes: tuple[int, ...], budget: int) -> None:
    problem = problem_of(lengths(seed, 5), nodes, budget=budget)
    start = best_table(problem, "dynamic")
    found = improve_few(problem, start)
    check_plan(found.to_plan(problem.topology, "joint"))
    assert problem.judge(found) <= problem.judge(start)
    assert np.array_equal(found.parent_first, improve_few(problem, start).parent_first)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(4, 4), (2, 2, 1), (4, 3), (2, 1, 1, 2)]))
def test_places_left_away_are_as_good_as_one_that_is_kept(seed: int, nodes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    problem = problem_of(lengths(seed, 3, 2000), nodes)
    places = Places(problem)
    plans = places.put(places.empty(1), 0, np.zeros(1, dtype=int), rng.integers(0, len(places.parent), 1))
    every = np.arange(len(places.parent))
    prices = places.price(places.put(plans, 1, np.zeros(len(every), dtype=int), every))
    kept = places.first_of_equal(plans)[0]
    for at in np.flatnonzero(~kept).tolist():
        alike = kept & (places.shape == places.shape[at])
        assert np.isclose(prices.seconds[alike], prices.seconds[at], rtol=1e-9).any()


def test_the_oracle_starts_from_a_poor_plan_and_leaves_it() -> None:
    """The oracle is worth something: given `static` it must find what the planner finds."""
    problem = problem_of(lengths(1, 3, 4000), (2, 2), budget=6000)
    static = best_table(problem, "static")
    optimum = solve(problem, 2, 8.0, static)
    assert optimum.seconds < 0.9 * even_seconds(problem, static)
    assert even_seconds(problem, best_table(problem, "joint")) <= optimum.seconds * 1.01


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([(4, 4), (4, 4, 4), (3, 3)]))
def test_given_packs_are_repacked_in_place(seed: int, nodes: tuple[int, ...]) -> None:
    world = sum(nodes)
    n = lengths(seed, 30, 3000)
    top = Block(0, world)
    given_plan = Plan(nodes, (Round(tuple(Placement(i, int(x), top, top, int(x) - 1) for i, x in enumerate(n))),), 7)
    cluster = FREE.model_copy(update={"rank_tokens_max": 100_000})
    problem = problem_of(n, nodes, rank_tokens_max=100_000)
    seconds = [problem.judge(table_of(given_plan).canonical())]
    for policy in ("repack", "repack+parents"):
        made = repack_plan(given_plan, cluster, HEADS, policy, budget=300)
        check_plan(made)
        assert {p.parent for p in made.placements} == {top}
        assert all(made.topology.in_one_node(p.child) or p.child == p.parent for p in made.placements)
        assert (made.step, made.policy) == (7, policy)
        seconds.append(problem.judge(table_of(made).canonical()))
    assert seconds[0] >= seconds[1] >= seconds[2]
    assert seconds[1] < seconds[0]


def test_short_samples_fill_what_a_wide_pack_leaves_free() -> None:
    """A long sample held by one node, attended to by two: the other node's ranks take short samples meanwhile."""
    n = np.array([9000, *[150] * 400])
    cluster = CLUSTER.model_copy(update={"rank_tokens_max": 60_000, "inter_rate": 1e9})
    plan = make_plan(Samples.of_lengths(n), Topology((4, 4)), cluster, HEADS, "joint", budget=0)
    long = next(p for p in plan.placements if p.sample == 0)
    assert (long.parent.width, long.child.width) == (8, 4)
    together = next(r for r in plan.rounds if long in r.placements)
    outside = [p for p in together.placements if not long.child.contains(p.child)]
    assert len(outside) > 30


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 8), st.integers(1, 40))
def test_evening_out_keeps_every_item_and_lowers_the_busiest(seed: int, ranks: int, items: int) -> None:
    rng = np.random.default_rng(seed)
    rank, seconds = rng.integers(0, ranks, items), rng.random(items)
    base = rng.random(ranks + 3)
    load = base + np.bincount(rank, seconds, ranks + 3)
    before = load[:ranks].max()
    even_out(rank, seconds, load, np.arange(ranks))
    assert rank.max() < ranks
    np.testing.assert_allclose(load, base + np.bincount(rank, seconds, ranks + 3))
    assert load[:ranks].max() <= before


def test_list_scheduling_gives_the_parts_of_a_wide_block_its_load() -> None:
    topology = Topology((4,))
    blocks = {w: topology.blocks_of_width(w) for w in (1, 2, 4)}
    load = np.zeros(4)
    first = list_schedule(np.array([2, 1, 1]), np.array([3.0, 2.0, 1.0]), blocks, load, {})
    assert first.tolist() == [0, 2, 3]
    assert load.tolist() == [3.0, 3.0, 2.0, 1.0]


def test_first_fit_never_overfills_a_bin() -> None:
    assert first_fit([7] * 8, 8) == list(range(8))
    assert first_fit([5, 4, 3, 2], 7) == [0, 1, 1, 0]


def test_candidates_keep_together_what_belongs_together() -> None:
    some = Candidates(np.array([0, 1]), np.array([2, 3]), np.array([4, 5]))
    assert some.at(1) == (1, 3, 5)
    assert len(some.select(np.array([True, False]))) == 1
