"""The loss is one sum over the labels of the step, whoever holds them; right values worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import TrainSection
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block, Topology
from raypack.training.parameters import Replicated, build_optimizer
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare
from tests.ranks import Case, routed_gradients_on_rank, tiny_model

pytestmark = pytest.mark.pool


class GivenLoss(nn.Module):
    """Every label costs what its rank is told, times a weight of 1; a second weight is used on some ranks only."""

    def __init__(self, cost: float, uses_second: bool) -> None:
        super().__init__()
        self.weight, self.second = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.cost, self.uses_second = cost, uses_second
        self.expert_layers: list[Any] = []

    def slots(self) -> list[Any]:
        return []

    def forward(self, tokens: Any, labels: torch.Tensor, *_: Any) -> torch.Tensor:
        count = (labels != -100).sum()
        loss = self.weight * self.cost * count
        return loss + 0.0 * self.second + (self.second - self.second.detach()) if self.uses_second else loss


def given_on_rank(
    rank: int, world: int, counts: list[list[int]], costs: list[float], second: int, dtype: str = "float64"
) -> tuple:
    """`counts[round][rank]` labelled tokens; returns loss and the gradients of both weights."""
    topology = Topology((world,))
    groups = Groups(topology, torch.device("cpu"), 60.0)
    train = TrainSection(dtype=dtype, clip_norm=0.0)
    parameters = Replicated.__new__(Replicated)
    parameters.model = GivenLoss(costs[rank], rank == second).to(getattr(torch, dtype))
    parameters.groups = groups
    parameters._used = parameters.masters = dict(parameters.model.named_parameters())
    if dtype == "bfloat16":
        parameters.masters = {n: nn.Parameter(p.detach().float()) for n, p in parameters._used.items()}
    optimizer = build_optimizer(parameters.masters, train)
    seen: dict[str, float] = {}
    optimizer.step = lambda: seen.update({n: float(p.grad) for n, p in parameters.masters.items()})
    wire = Wire(groups, Ledger(topology, rank))
    trainer = Trainer(parameters, optimizer, train, 1, wire, groups, torch.device("cpu"))
    rounds = []
    for number, each in enumerate(counts):
        alone = [Placement(100 * number + r, max(n, 1) + 1, Block(r, 1), Block(r, 1), n) for r, n in enumerate(each)]
        rounds.append(Round(tuple(alone)))
    plan = Plan(nodes=(world,), rounds=tuple(rounds))

    def load(samples, lengths, lows, highs):
        rows = int((highs - lows).sum())
        labels = np.full(rows, -100)
        labels[: counts[int(samples[0]) // 100][rank]] = 1
        return np.zeros(rows, np.int64), labels

    result = train_step(trainer, prepare(plan, topology, rank, tiny_model(), load))
    return result.loss, seen.get("weight"), seen.get("second")


def test_the_mean_is_over_tokens_not_over_ranks(pool):
    """(5 x 1 + 1 x 7) / 6 = 2, not the mean of means, 4; what is logged is what is differentiated."""
    for loss, gradient, _ in pool.run(2, given_on_rank, [[5, 1]], [1.0, 7.0], 0):
        assert (loss, gradient) == pytest.approx((2.0, 2.0), rel=1e-12)


def test_the_mean_is_over_the_rounds_of_a_step_too(pool):
    assert pool.run(1, given_on_rank, [[5], [1]], [2.0], 0)[0][:2] == pytest.approx((2.0, 2.0), rel=1e-12)


def test_gradients_of_many_rounds_add_up_in_fp32_in_a_bf16_model(pool):
    """512 rounds of 1/512 each: a bf16 sum stops at 0.5."""
    ((_, gradient, _),) = pool.run(1, given_on_rank, [[1]] * 512, [1.0], 5, "bfloat16")
    assert gradient == 1.0


def test_the_number_of_ranks_is_no_factor(pool):
    for loss, gradient, _ in pool.run(8, given_on_rank, [[100] * 8], [1.0] * 8, 0):
        assert (loss, gradient) == pytest.approx((1.0, 1.0), rel=1e-12)


def test_a_rank_without_labels_adds_nothing(pool):
    for loss, gradient, _ in pool.run(2, given_on_rank, [[4, 0]], [2.0, 5.0], 0):
        assert (loss, gradient) == pytest.approx((2.0, 2.0), rel=1e-12)


def test_a_parameter_that_one_rank_never_used_is_reduced_with_zeros(pool):
    results = pool.run(2, given_on_rank, [[1, 1]], [1.0, 1.0], 0)
    assert [second for _, _, second in results] == [0.5, 0.5]


def test_expert_counts_do_not_depend_on_the_width(pool):
    model = tiny_model(layers=2)
    found = []
    for width in (1, 2, 4):
        block = Block(0, width)
        plan = Plan(nodes=(width,), rounds=(Round((Placement(0, 33, block, block, 32),)),))
        results = pool.run(width, routed_gradients_on_rank, Case(model), plan, None)
        chosen = {key: experts for r in results for key, experts in r[2].items()}
        found.append(np.bincount(np.concatenate(list(chosen.values())), minlength=4).tolist())
    assert found[0] == found[1] == found[2]


def test_gradients_are_summed_over_the_ranks_of_a_sequence(pool):
    """Every rank ends with the same bits (the reduction is over the world, not over data-parallel replicas only)."""
    block = Block(0, 2)
    plan = Plan(nodes=(2,), rounds=(Round((Placement(0, 8, block, block, 7),)),))
    (_, first, _), (_, second, _) = pool.run(2, routed_gradients_on_rank, Case(tiny_model(experts=4)), plan, None)
    assert all(np.array_equal(first[name], second[name]) for name in first)
