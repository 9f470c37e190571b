"""What a step does besides its gradients: the optimizer, the router's bias, fp32 masters, steps that all ranks skip.

Ranks are threads of this process.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from raypack.config import TrainSection
from raypack.errors import Leaving, RaypackError
from raypack.plan.plan import Plan, Round
from raypack.training.replicas import check_replicas
from raypack.training.step import StepResult, evaluate_loss, train_step
from raypack.training.work import prepare
from tests import threads
from tests.ranks import (
    Case,
    Plain,
    disagreeing_on_rank,
    full,
    loader,
    make_trainer,
    routed_gradients_on_rank,
    stepping_on_rank,
    tiny_model,
)
from tests.test_small_worlds import FP64, HEADS, place


def trained_on_rank(rank: int, world: int, case: Case, plans: list[Plan]) -> tuple[list[StepResult], dict[str, Any]]:
    """The results of a step a plan; weights and router biases at the end."""
    trainer = make_trainer(case, plans[0].topology, steps=len(plans))
    results = [train_step(trainer, prepare(plan, plan.topology, rank, case.model, loader(case))) for plan in plans]
    found = {name: full(p) for name, p in trainer.parameters.masters.items()}
    return results, found | {name: full(b) for name, b in trainer.parameters.model.named_buffers()}


@pytest.mark.parametrize("shard", ["none", "world"])
def test_steps_are_those_of_a_plain_loop_with_adamw(shard):
    """Warm-up, cosine, clipping that bites, weight decay on matrices only: by hand on one rank, weights compared."""
    train = FP64.model_copy(
        update={
            "shard": shard, "lr": 1e-2, "warmup_steps": 2, "lr_min_share": 0.1, "weight_decay": 0.3, "clip_norm": 0.2,
        }
    )  # fmt: skip
    case = Case(tiny_model(experts=0, window=4), train)
    plain = Plain(case)
    matrices = [p for p in plain.parameters.values() if p.dim() == 2]
    vectors = [p for p in plain.parameters.values() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        betas=(train.beta1, train.beta2), eps=train.eps,
    )  # fmt: skip
    expected = []
    for lr in (5e-3, 1e-2, 1e-2, 5.5e-3, 1e-3):
        adam.zero_grad()
        loss = plain.loss(HEADS)
        loss.backward()
        grads = [p.grad for p in plain.parameters.values()]
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
        assert norm > 0.2
        for g in grads:
            g.mul_(0.2 / norm)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        expected.append((float(loss.detach()), norm, lr))
    for results, weights in threads.run(4, trained_on_rank, case, [HEADS.at(i, None, None) for i in range(5)]):
        got = [(r.loss, r.grad_norm, r.lr) for r in results]
        assert np.array(got) == pytest.approx(np.array(expected), rel=1e-5)
        for name, right in plain.parameters.items():
            # torch adds 1e-6 to the norm before it divides.
            assert np.abs(weights[name] - full(right)).max() <= 1e-6, name


def test_a_step_moves_the_routers_bias_by_the_tokens_of_all_ranks_and_rounds():
    case = Case(tiny_model(), FP64.model_copy(update={"balance_rate": 0.25}))
    chosen = [r[2] for r in threads.run(4, routed_gradients_on_rank, case, HEADS, None)]
    counts = np.zeros((case.model.layers, case.model.experts))
    for each in chosen:
        for (layer, _, _), experts in each.items():
            counts[layer, experts] += 1
    assert counts.sum() == case.model.layers * HEADS.tokens * case.model.experts_active
    mean = counts.mean(1, keepdims=True)
    assert np.abs(counts - mean).max() > 1
    for (result,), weights in threads.run(4, trained_on_rank, case, [HEADS]):
        assert result.expert_load == pytest.approx((counts / mean).max())
        for layer in range(case.model.layers):
            move = 0.25 * np.clip((mean[layer] - counts[layer]) / mean[layer], -1, 1)
            assert weights[f"layers.{layer}.ffn.bias"] == pytest.approx(move)


@pytest.mark.parametrize("shard", ["none", "world"])
def test_a_bf16_model_trains_fp32_masters_and_computes_with_them(shard):
    train = TrainSection(dtype="bfloat16", shard=shard, warmup_steps=0, weight_decay=0.0, clip_norm=0.0)
    model = tiny_model(experts=0)
    small, large = (Case(model, train.model_copy(update={"lr": lr, "lr_min_share": 1.0})) for lr in (1e-6, 1e-2))
    before = Plain(Case(model, TrainSection(dtype="float32"))).parameters
    for _, weights in threads.run(4, trained_on_rank, small, [HEADS]):
        for name, weight in before.items():
            # Adam's first step is of size lr, but for gradients as small as its eps. bf16 is a hundred times as coarse
            # here, and would stay where it is.
            moved = np.abs(weights[name] - full(weight))
            assert np.median(moved) == pytest.approx(1e-6, rel=0.3), name
    for results, _ in threads.run(4, trained_on_rank, large, [HEADS, HEADS.at(1, None, None)]):
        assert results[1].loss < results[0].loss - 0.01


@pytest.mark.parametrize("shard", ["none", "world"])
def test_a_loss_that_is_not_finite_is_skipped_by_all_ranks_alike(shard):
    case = Case(tiny_model(), FP64.model_copy(update={"shard": shard}))
    results = threads.run(4, stepping_on_rank, case, [HEADS.at(i, None, None) for i in range(3)], 1)
    assert [[applied for _, applied, _, _ in r] for r in results] == [[True, False, True]] * 4
    assert all(r[1][3] for r in results)  # weights as before the skipped step
    for r in results:
        for (_, _, weights, _), (_, _, first, _) in zip(r, results[0], strict=True):
            assert all(np.array_equal(weights[n], first[n]) for n in first)


def test_ranks_with_different_plans_all_raise_the_same_error_before_the_first_exchange():
    other = Plan(HEADS.nodes, (Round((place(0, 30, (0, 2), (0, 2)),)),))
    a, b = ([HEADS, plan.at(1, None, None)] for plan in (HEADS, other))
    texts = threads.run(4, disagreeing_on_rank, Case(tiny_model()), [a, a, a, b], {})
    assert len(set(texts)) == 1
    assert texts[0].startswith("ranks disagree before the step: rank 3 brings step 1")


def test_trouble_of_one_rank_is_the_error_of_all():
    texts = threads.run(4, disagreeing_on_rank, Case(tiny_model()), [[HEADS]] * 4, {2: "the disk is gone"})
    assert texts == ["rank 2 cannot go on: the disk is gone"] * 4


def held_out_on_rank(rank: int, world: int, case: Case, plan: Plan, before: bool) -> list[float]:
    """The plan's loss, a step on the plan, its loss again; the first only where `before`."""
    trainer = make_trainer(case, plan.topology)
    work = prepare(plan, plan.topology, rank, case.model, loader(case))
    first = [evaluate_loss(trainer, work)] if before else []
    train_step(trainer, work)
    return [*first, evaluate_loss(trainer, work)]


@pytest.mark.parametrize("shard", ["none", "world"])
def test_the_held_out_loss_is_that_of_the_weights_at_that_time_over_all_labels(shard):
    case = Case(tiny_model(), FP64.model_copy(update={"shard": shard, "lr": 1e-2, "warmup_steps": 0}))
    right = float(Plain(case).loss(HEADS).detach())
    found = threads.run(4, held_out_on_rank, case, HEADS, True)
    after = threads.run(4, held_out_on_rank, case, HEADS, False)
    assert [first for first, _ in found] == pytest.approx([right] * 4, rel=1e-10)
    assert [[second] for _, second in found] == after
    assert after[0][0] < right - 0.01


def leaving_on_rank(rank: int, world: int, case: Case, plan: Plan) -> str:
    trainer = make_trainer(case, plan.topology)
    work = prepare(plan, plan.topology, rank, case.model, loader(case))
    with pytest.raises(Leaving) as left:
        train_step(trainer, work, leave=rank == 2)
    return str(left.value)


def test_where_one_rank_was_asked_to_leave_all_leave_before_the_step():
    assert threads.run(4, leaving_on_rank, Case(tiny_model()), HEADS) == ["before step 0"] * 4


def replicas_on_rank(rank: int, world: int, case: Case, plan: Plan, spoiled: str) -> str:
    trainer = make_trainer(case, plan.topology)
    tensors = dict(trainer.parameters.model.named_parameters()) | dict(trainer.parameters.model.named_buffers())
    check_replicas(trainer, 7)
    with torch.no_grad():
        if rank == 1:
            tensors[spoiled].view(-1)[0] += 2.0**-30
    with pytest.raises(RaypackError) as differ:
        check_replicas(trainer, 8)
    return str(differ.value)


@pytest.mark.parametrize("spoiled", ["norm.weight", "layers.1.ffn.bias"])
def test_a_bit_that_differs_on_one_rank_is_named_on_all(spoiled):
    for text in threads.run(4, replicas_on_rank, Case(tiny_model(), FP64), HEADS, spoiled):
        assert "rank 1 brings weights" in text
        assert "after 8 steps" in text
