"""Whole steps on a few ranks that are threads of this process: seconds, before any rank is spawned.

The property tests of the rank pool draw what is fixed here. This is where a wrong sum, a lost row or a missing factor
shows first, and what `make mutants` leans on.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from raypack.config import TrainSection, load_cluster
from raypack.exchange.gathered.keys import gather_keys
from raypack.exchange.gathered.plan import plan_gather
from raypack.exchange.halo.plan import plan_halo
from raypack.exchange.halo.rows import halo_rows
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block
from raypack.planning.evaluate import evaluate
from tests import threads
from tests.linear_ranks import set_up
from tests.ranks import (
    Case,
    Rows,
    gradients_on_rank,
    layer_outputs_on_rank,
    oracle,
    tiny_model,
)
from tests.test_invariant import check

FP64 = TrainSection(dtype="float64", chunk_tokens=7)


def place(
    sample: int, length: int, parent: tuple[int, int], child: tuple[int, int], attention: str = "ulysses"
) -> Placement:
    return Placement(sample, length, Block(*parent), Block(*child), length - 1, attention)


# Documents longer than every window and over the borders of ranks and nodes, children inside parents and inside each
# other, two parents of one child, documents that never travel, one of a single token; two rounds, the second of which
# is replayed. In that of SPREAD no child differs from its parent: S layers must not take over F's exchange.
HEADS = Plan(
    (2, 2),
    (
        Round(
            (
                place(0, 30, (0, 4), (0, 2)),
                place(1, 11, (0, 4), (3, 1)),
                place(2, 9, (1, 1), (1, 1)),
                place(5, 8, (0, 2), (0, 2)),
            )
        ),
        Round((place(3, 17, (2, 2), (2, 2)), place(4, 1, (0, 4), (0, 4))), "full"),
    ),
)
SPREAD = Plan(
    (2, 2),
    (
        Round(
            (place(0, 40, (0, 4), (0, 2), "hsap"), place(1, 21, (0, 4), (2, 2), "hsap"), place(2, 9, (0, 4), (3, 1)))
        ),
        Round((place(3, 33, (0, 4), (0, 4), "hsap"), place(4, 7, (1, 1), (1, 1))), "full"),
    ),
)
# Blocks of four, three and two ranks around one rank; borders just behind the first token of a document, inside
# documents that fill whole shards, and between shards that are shorter than a convolution.
STREAMS = Plan(
    (3, 1),
    (
        Round(
            (
                *(place(i, n, (0, 4), (0, 4)) for i, n in enumerate((6, 5, 15))),
                place(3, 4, (0, 3), (0, 3)),
                place(4, 13, (0, 2), (0, 2)),
            )
        ),
        Round((place(5, 9, (0, 4), (0, 4)), place(6, 17, (0, 3), (0, 3)), place(7, 5, (1, 1), (1, 1))), "full"),
    ),
)
GATHERED = Plan(
    STREAMS.nodes,
    tuple(Round(tuple(p._replace(attention="kv_gather") for p in r.placements), r.recompute) for r in STREAMS.rounds),
)
# Attention that is not uniform at the start (norms of Q and K), a window and sinks that bite.
SOFTMAX = tiny_model(pattern="FS", window=4, sinks=2, qk_norm=True, shared_expert_width=5)
LINEAR = tiny_model(
    pattern="LF", experts=0, linear_conv=4, linear_decay="gate", linear_norm=True, linear_feature="silu", linear_chunk=4
)
ROOMY = load_cluster("local-2x4", {"rank_tokens_max": 10_000})


@pytest.mark.parametrize(
    ("model", "plan", "shard"),
    [
        (SOFTMAX, HEADS, "none"),
        (SOFTMAX, HEADS, "world"),
        (SOFTMAX, GATHERED, "none"),
        (SOFTMAX.model_copy(update={"kv_heads": 1}), SPREAD, "none"),
        (SOFTMAX.model_copy(update={"heads": 6, "kv_heads": 3}), SPREAD, "none"),
        (LINEAR, STREAMS, "none"),
        (LINEAR.model_copy(update={"linear_decay": "head", "tied_head": True}), STREAMS, "none"),
    ],
    ids=["heads", "sharded", "gathered", "hsap-sharers", "hsap-uneven", "gated", "decayed"],
)
def test_a_step_is_that_of_one_rank_and_sends_what_the_cost_model_says(model, plan, shard):
    ledgers = check(threads, Case(model, FP64.model_copy(update={"shard": shard})), plan)
    sent = sum((Counter(ledger[kind]) for ledger in ledgers for kind in ("exchanged", "collected")), Counter())
    for site, scopes in evaluate(plan, ROOMY, model, itemsize=8).bytes.items():
        for scope, size in scopes.items():
            assert sent[site, scope] == size, (site, scope)


# -- sums --------------------------------------------------------------------------------------------------------


def returned_on_rank(rank: int, world: int, how: str) -> list[float]:
    """Gradient of this rank's row of bf16, of which rank r gives back 1, 2^-8 and 2^-8 for r = 1, 2, 3."""
    whole = Block(0, world)
    placement = place(0, world, whole, whole, "kv_gather" if how == "keys" else "ulysses")
    layout, wire = set_up(Round((placement,)), (world,))
    row = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    if how == "keys":
        plan = plan_gather(layout, rank)
        assert plan is not None
        rows = gather_keys(row, plan.blocks[0], wire)[:-1]  # without the row itself
    else:
        rows = halo_rows(row, plan_halo(layout, rank, layout.segments(rank), world), wire)
    share = torch.full_like(rows, [0.0, 1.0, 2.0**-8, 2.0**-8][rank])
    (grad,) = torch.autograd.grad((rows * share).sum(), row)
    return grad.flatten().tolist()


@pytest.mark.parametrize("how", ["keys", "halo"])
def test_gradients_of_a_row_that_several_ranks_used_are_summed_in_fp32(how):
    """A sum in bf16 would drop both small terms."""
    assert threads.run(4, returned_on_rank, how)[0] == [1.0078125]


# -- bf16 --------------------------------------------------------------------------------------------------------

# bf16 has 8 bits: each operand is off by up to 2^-9 = 0.2 %, and a dozen products follow one another. Outputs are off
# by 1.2 % here, gradients by 2.3 %; a window that is short by one moves gradients by 49 %, no rotation by 110 %.
OUTPUTS, GRADIENTS = 0.03, 0.05
EVERY_KIND = tiny_model(
    pattern="FSLF", layers=4, width=16, head_dim=8, window=4, sinks=2, qk_norm=True, experts=0, linear_conv=4,
    linear_decay="gate", linear_norm=True, linear_feature="silu",
)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "shard"),
    [(HEADS, "none"), (HEADS, "world"), (GATHERED, "none"), (SPREAD, "none")],
    ids=["heads", "sharded", "gathered", "hsap"],
)
def test_in_bf16_every_gradient_and_what_every_layer_adds_stay_near_fp64(plan, shard):
    case = Case(EVERY_KIND, TrainSection(dtype="bfloat16", shard=shard, chunk_tokens=16))
    _, grads = oracle(Case(EVERY_KIND), plan)
    for _, seen, _ in threads.run(4, gradients_on_rank, case, plan):
        for name, right in grads.items():
            assert_near(of_kinds(name, seen[name]), of_kinds(name, right), GRADIENTS, name)
    (right,) = threads.run(1, layer_outputs_on_rank, Case(EVERY_KIND), on_one_rank(plan))
    found: dict[str, Rows] = {name: {} for name in right}
    for mine in threads.run(4, layer_outputs_on_rank, case, plan):
        for name, rows in mine.items():
            found[name].update(rows)
    for name, rows in right.items():
        assert found[name].keys() == rows.keys()
        assert_near([np.stack([found[name][at] for at in rows])], [np.stack(list(rows.values()))], OUTPUTS, name)


def assert_near(found: list[np.ndarray], right: list[np.ndarray], bound: float, name: str) -> None:
    for a, b in zip(found, right, strict=True):
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b), name


def of_kinds(name: str, gradient: np.ndarray) -> list[np.ndarray]:
    """Those of Q, K and V apart: V's is so much larger that an error of the others would not be seen."""
    if not name.endswith("qkv.weight"):
        return [gradient]
    heads, kv_heads = EVERY_KIND.heads, EVERY_KIND.kv_heads
    return np.split(gradient, np.array([heads, heads + kv_heads]) * EVERY_KIND.head_dim)


def on_one_rank(plan: Plan) -> Plan:
    alone = Block(0, 1)
    every = (p._replace(parent=alone, child=alone, attention="ulysses") for p in plan.placements)
    return Plan((1,), (Round(tuple(every)),))
