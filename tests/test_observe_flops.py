"""MFU's truth: FLOPs by layer kind equal a brute-force count on small cases, and are the same for any plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from raypack.comm.ledger import Ledger
from raypack.comm.wire import Wire
from raypack.cost.rates import TRAIN_PASSES
from raypack.layers.costs import model_flops, train_flops
from raypack.layers.frame import build_frame
from raypack.model.decoder import HybridModel, initialize
from raypack.observe.collector import merge
from raypack.plan.names import POLICIES
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.samples import Samples
from raypack.plan.topology import Block, Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import make_plan
from tests.observe_cases import FACTS, report
from tests.planning_cases import CLUSTER
from tests.ranks import tiny_model


def pairs_by_hand(length: int, window: int | None, sinks: int) -> int:
    """Every query and every key it may see, one by one."""
    return sum(
        window is None or query - key < window or key < sinks for query in range(length) for key in range(query + 1)
    )


@pytest.mark.parametrize("window", [1, 3, 50])
@pytest.mark.parametrize("sinks", [0, 2])
def test_attention_flops_are_those_of_every_pair(window: int, sinks: int) -> None:
    model = tiny_model(pattern="FSS", layers=5, window=window, sinks=sinks)
    lengths = [1, 2, 7, 30]
    counted = train_flops(model, lengths)
    # A pair costs a dot product and a weighted sum in every query head: 2 x 2 FLOPs a number, three passes.
    each = TRAIN_PASSES * 4 * model.heads * model.head_dim
    full, sparse = model.kinds.count("F"), model.kinds.count("S")
    for i, n in enumerate(lengths):
        assert counted["full"][i] == full * each * pairs_by_hand(n, None, 0)
        assert counted["sparse"][i] == sparse * each * pairs_by_hand(n, window, sinks)


@pytest.mark.parametrize(
    "changes",
    [{"experts": 0}, {"experts": 4}, {"experts": 4, "shared_expert_width": 7}, {"experts": 0, "tied_head": True}],
    ids=["dense", "experts", "shared expert", "tied head"],
)
def test_products_of_the_model_itself_are_what_is_counted(changes: dict) -> None:
    """PyTorch's own counter over one forward pass, attention left out (its CPU path multiplies masked pairs too).

    In fp64, where experts are plain products: the counter does not know the grouped one.
    """
    model = tiny_model(pattern="FS", layers=3, **changes)
    lengths = [5, 11, 1]
    network = HybridModel(model, chunk_tokens=8).double()
    initialize(network, model, seed=1)
    placed = tuple(Placement(i, n, Block(0, 1), Block(0, 1), n - 1) for i, n in enumerate(lengths))
    topology = Topology((1,))
    frame = build_frame(Round(placed), topology, 0, model)
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(tokens, tokens, frame, Wire(None, Ledger(topology, 0)))
    by_operation = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in by_operation.items() if "attention" not in str(operation))
    counted = train_flops(model, lengths)
    expected = sum(float(counted[kind].sum()) for kind in ("projections", "feed_forward", "head")) / TRAIN_PASSES
    assert products == expected


@settings(max_examples=15)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=10), st.randoms(use_true_random=False))
def test_flops_are_the_same_for_any_plan(lengths: list[int], random) -> None:
    model = tiny_model(pattern="FS", layers=3)
    topology = Topology((2, 2))
    roomy = CLUSTER.model_copy(update={"rank_tokens_max": 100_000})
    made = []
    for _ in range(3):
        placed: list[list[Placement]] = [[], []]
        for i, n in enumerate(lengths):
            parent = random.choice(topology.blocks)
            child = random.choice([b for b in topology.blocks if parent.contains(b)])
            placed[random.randrange(2)].append(Placement(i, n, parent, child, n - 1))
        made.append(Plan(topology.nodes, tuple(Round(tuple(each), random.choice(["none", "full"])) for each in placed)))
    made += [
        make_plan(Samples.of_lengths(lengths), topology, roomy, model, policy, budget=0, longest=max(lengths))
        for policy in POLICIES
    ]
    found = {evaluate(plan, roomy, model).model_flops for plan in made}
    assert found == {model_flops(model, np.array(lengths))}


def test_mfu_is_flops_over_the_slowest_ranks_seconds_of_all_ranks() -> None:
    """6e9 FLOPs in 3 s on 2 ranks of 1e9 FLOP/s."""
    merged = merge([report(0), report(1)])
    assert merged.mfu == pytest.approx(FACTS.model_flops / (3.0 * 2 * 1e9))
