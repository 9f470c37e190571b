"""`evaluate`: bounds hold for every plan, illegal plans are refused by name, figures add up."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypack.config import ModelConfig
from raypack.errors import RaypackError
from raypack.layers.costs import Costs
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.plan_file import plan_from_json
from raypack.plan.topology import Block, Topology
from raypack.planning.bounds import bounds, least_time
from raypack.planning.evaluate import evaluate
from raypack.planning.shapes import shapes
from tests.planning_cases import CLUSTER, MODEL, models, plans

ROOMY = CLUSTER.model_copy(update={"rank_tokens_max": 100_000})


@settings(max_examples=120, deadline=None)
@given(plans(), models(), st.sampled_from(["step", "layer", "node"]), st.sampled_from([0, 1, 3]))
def test_no_plan_is_quicker_than_its_bounds(plan: Plan, model: ModelConfig, sync: str, prefetch: int) -> None:
    cluster = ROOMY.model_copy(update={"prefetch_layers": prefetch})
    found = evaluate(plan, cluster, model, sync)
    assert found.plain_bound_seconds <= found.bound_seconds * (1 + 1e-12)
    assert found.bound_seconds <= found.seconds * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(plans(), models(), st.sampled_from(["step", "layer", "node"]))
def test_busy_and_waiting_fill_the_step(plan: Plan, model: ModelConfig, sync: str) -> None:
    found = evaluate(plan, ROOMY, model, sync)
    assert found.rank_busy.max() <= found.seconds * (1 + 1e-9)
    np.testing.assert_allclose(found.rank_busy + found.rank_waiting, found.seconds)
    assert found.rank_tokens.sum() == plan.tokens
    assert found.rank_tokens_max >= found.rank_tokens.max() / max(found.rounds, 1) - 1e-9


@pytest.mark.parametrize("sync", ["step", "layer", "node"])
def test_a_rank_alone_never_waits(sync: str) -> None:
    alone = (Placement(i, n, Block(0, 1), Block(0, 1), n - 1) for i, n in enumerate((900, 40, 300)))
    plan = Plan((1,), tuple(Round((placement,)) for placement in alone))
    found = evaluate(plan, ROOMY.model_copy(update={"round_seconds": 1e-3}), MODEL, sync)
    assert found.rank_busy.tolist() == pytest.approx([found.seconds])


@settings(max_examples=60, deadline=None)
@given(plans(), models())
def test_waiting_in_every_layer_never_saves_time(plan: Plan, model: ModelConfig) -> None:
    seconds = {sync: evaluate(plan, ROOMY, model, sync).seconds for sync in ("step", "layer", "node")}
    lock = ROOMY.model_copy(update={"prefetch_layers": 0})
    assert evaluate(plan, lock, model, "layer").seconds >= seconds["layer"] * (1 - 1e-9)
    assert evaluate(plan, lock, model, "layer").seconds >= seconds["node"] * (1 - 1e-9)


def test_bytes_of_one_sample_by_hand() -> None:
    """1 full layer, 3 sparse ones, 4 ranks on 2 nodes, parent 4, child 2, 4 heads of 16, bf16."""
    model = MODEL.model_copy(update={"heads": 4, "kv_heads": 4})
    plan = Plan((2, 2), (Round((Placement(0, 100, Block(0, 4), Block(0, 2), 99),)),))
    head = 16 * 2
    found = evaluate(plan, ROOMY, model).bytes
    # Full in: 100 tokens, 3 heads a rank (Q, K, V); each child rank keeps its own part and crosses to two ranks.
    assert found["full_in"] == {"intra": 2 * 100 * 3 * head, "inter": 2 * 200 * 3 * head}
    assert found["full_out"] == {"intra": 2 * 100 * head, "inter": 2 * 200 * head}
    assert found["sparse_in"] == {"intra": 3 * 2 * 100 * 6 * head, "inter": 0}
    assert found["sparse_out"] == {"intra": 3 * 2 * 100 * 2 * head, "inter": 0}


def test_replayed_rounds_send_their_exchanges_once_more() -> None:
    placements = (Placement(0, 100, Block(0, 2), Block(0, 2), 99),)
    once, replayed, selective = (
        evaluate(Plan((2,), (Round(placements, how),)), ROOMY, MODEL) for how in ("none", "full", "selective")
    )
    assert replayed.bytes_of("intra") * 2 == once.bytes_of("intra") * 3
    assert selective.bytes == once.bytes
    assert once.seconds < selective.seconds < replayed.seconds
    assert once.model_flops == replayed.model_flops


def test_an_empty_rank_and_an_empty_round_cost_nothing() -> None:
    alone = Round((Placement(0, 300, Block(0, 1), Block(0, 1), 299),))
    one = evaluate(Plan((3,), (alone,)), ROOMY, MODEL)
    two = evaluate(Plan((3,), (alone, Round(()))), ROOMY, MODEL)
    assert one.seconds == two.seconds
    assert one.rank_busy[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ([[(0, 10, (0, 2), (0, 1))], [(0, 10, (0, 2), (0, 1))]], "sample 0: the sample occurs twice"),
        ([[(0, 10, (0, 2), (2, 1))]], r"child \[2, 1\] lies outside its parent \[0, 2\]"),
        ([[(0, 10, (1, 2), (1, 1))]], r"parent \[1, 2\] is no block of nodes \[4\]"),
        ([[(0, 300_000, (0, 4), (0, 4))]], "round 0: rank 0 holds 75000 tokens, over the cap of 4096"),
        ([[(0, 8000, (0, 4), (0, 2)), (1, 400, (0, 1), (0, 1))]], "over the cap of 4096"),
    ],
)
def test_illegal_plans_are_refused_by_name(rounds: list, words: str) -> None:
    data = {
        "ranks": 4,
        "rounds": [
            [{"sample": s, "length": n, "parent": list(p), "child": list(c)} for s, n, p, c in placements]
            for placements in rounds
        ],
    }
    with pytest.raises(RaypackError, match=words) as caught:
        evaluate(plan_from_json(json.dumps(data)), CLUSTER, MODEL)
    assert "\n" not in str(caught.value)


def test_head_memory_is_a_limit_of_its_own() -> None:
    """Copied KV heads: each of 4 ranks holds 1 of 4 query heads and the only KV head, half of all heads."""
    model = MODEL.model_copy(update={"heads": 4, "kv_heads": 1})
    plan = Plan((4,), (Round((Placement(0, 8400, Block(0, 4), Block(0, 4), 0),)),))
    with pytest.raises(RaypackError, match="holds 4200 tokens' worth of Q, K and V heads in a full layer"):
        evaluate(plan, CLUSTER, model)


def test_unknown_sync_is_refused() -> None:
    plan = Plan((1,), (Round((Placement(0, 10, Block(0, 1), Block(0, 1), 9),)),))
    with pytest.raises(RaypackError, match="sync = 'never': one of step, layer, node"):
        evaluate(plan, CLUSTER, MODEL, "never")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_least_time_is_the_first_time_at_which_the_areas_fit(seed: int, rows: int, options: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    seconds, area = rng.random((rows, options)), rng.random((rows, options)) * 3
    counts = rng.integers(1, 4, rows)

    def fits(time: float) -> bool:
        least = np.where(seconds <= time, area, np.inf).min(axis=1)
        return bool((least * counts).sum() <= ranks * time)

    found = least_time(seconds, area, counts, ranks)
    assert fits(found * (1 + 1e-9))
    assert not any(fits(found * share) for share in np.linspace(0.01, 0.999, 60))


def test_tables_take_the_least_over_blocks_that_lie_differently() -> None:
    """On nodes (4, 3) there is one block of 7; on (3, 4, 7) the blocks of 7 cross nodes or do not."""
    crossing = shapes(Topology((3, 4)), Costs(MODEL, CLUSTER))
    both = shapes(Topology((3, 4, 7, 1)), Costs(MODEL, CLUSTER))
    assert crossing.inter[crossing.index(7, 7)] > 0
    assert both.inter[both.index(7, 7)] == 0
    n = np.array([700])
    assert bounds(both, n, 15).area <= bounds(crossing, n, 7).area
