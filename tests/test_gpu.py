"""What only a CUDA device can show: NCCL groups in a world of one, kernels against the oracle in bf16, one train step.

Run on a GPU machine as `pytest tests/test_gpu.py`; elsewhere everything here is skipped.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from raypack.config import ModelConfig, TrainSection
from raypack.model import reference
from raypack.model.kernels import attention, select_backend
from raypack.parallel.groups import Groups
from raypack.parallel.ledger import Ledger
from raypack.parallel.topology import Block, Topology
from raypack.parallel.wire import Wire
from raypack.planning.plan import Placement, Plan, Round
from raypack.training.optimizer import build_optimizer
from raypack.training.parameters import build_parameters
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare
from tests.ranks import Case, loader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
LENGTHS = (1, 700, 63, 257, 100)


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (128, 0), (1, 0), (128, 4)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 4)])
def test_bf16_kernels_agree_with_the_oracle_outputs_and_gradients(window, sinks, heads, kv_heads):
    """bf16 keeps 8 bits; outputs are averages of unit normals: 2 % of the largest value covers rounding of q, k, v."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, dim = sum(LENGTHS), 64
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device="cuda", generator=generator)
    grad = torch.randn(rows, heads, dim, device="cuda", generator=generator)
    sizes = [heads, kv_heads, kv_heads]
    half = qkv.bfloat16().requires_grad_()
    got = attention(*half.split(sizes, 1), LENGTHS, window=window, sinks=sinks)
    got.backward(grad.bfloat16())
    exact = half.detach().double().cpu().requires_grad_()
    expected = reference.attention(*exact.split(sizes, 1), LENGTHS, window=window, sinks=sinks)
    expected.backward(grad.double().cpu())
    assert select_backend("cuda", torch.bfloat16, sinks=sinks > 0) != "exact"
    for a, b in ((got, expected), (half.grad, exact.grad)):
        assert (a.double().cpu() - b).abs().max() <= 0.02 * b.abs().max()


@pytest.mark.parametrize("shard", ["none", "world"])
def test_a_step_on_nccl_in_a_world_of_one_lowers_the_loss(world_of_one, shard):
    device = torch.device("cuda", 0)
    groups = Groups(Topology((1,)), device, timeout=60.0)
    assert groups.host is not None
    model = ModelConfig(layers=4, experts=4, width=128, heads=8, kv_heads=2, head_dim=64, window=64)
    case = Case(model, TrainSection(dtype="bfloat16", shard=shard, lr=1e-2, warmup_steps=0))
    parameters = build_parameters(model, case.train, 0, groups, device)
    trainer = Trainer(
        parameters, build_optimizer(parameters.masters, case.train), case.train, 8,
        Wire(groups, Ledger(Topology((1,)), 0)), groups, device,
    )  # fmt: skip
    alone = Block(0, 1)
    round_ = Round(tuple(Placement(i, n, alone, alone, n - 1) for i, n in enumerate(LENGTHS[1:])))
    losses = []
    for step in range(8):
        plan = Plan(nodes=(1,), rounds=(round_,), step=step)
        losses.append(train_step(trainer, prepare(plan, plan.topology, 0, model, loader(case))).loss)
    assert losses[-1] < losses[0]
