"""What only CUDA devices can show: kernels against the oracle in bf16, and whole steps with NCCL between GPUs.

    pytest tests/test_gpu.py                                    # one GPU, a world of one: nothing is exchanged
    torchrun --nproc-per-node 8 -m pytest tests/test_gpu.py     # NCCL over the GPUs of a machine, as if two nodes

Elsewhere everything here is skipped. Under torchrun on a machine without GPUs the steps run over gloo, which proves
nothing about GPUs but that the tests themselves are right.
"""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from raypack.config import ModelConfig, TrainSection
from raypack.kernels.attention import attention, select_backend
from raypack.layers import oracle as layer_oracle
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block
from tests.ranks import Case, gradients_on_rank, losses_on_rank, oracle, tiny_model
from tests.test_invariant import check
from tests.test_small_worlds import GRADIENTS, assert_near

CUDA, LOCAL_RANK = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
DEVICE = "cuda" if CUDA else "cpu"
UNDER_TORCHRUN = "LOCAL_RANK" in os.environ
LENGTHS = (1, 700, 63, 257, 100)

on_a_gpu = pytest.mark.skipif(not CUDA, reason="no CUDA device on this machine")
pytestmark = [
    pytest.mark.skipif(not CUDA and not UNDER_TORCHRUN, reason="no CUDA device on this machine"),
    pytest.mark.skipif(CUDA and torch.cuda.device_count() <= LOCAL_RANK, reason=f"no GPU for local rank {LOCAL_RANK}"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    """Ranks: those of torchrun, or this one alone."""
    if CUDA:
        torch.cuda.set_device(LOCAL_RANK)
    backend, limit = "cpu:gloo,cuda:nccl" if CUDA else "gloo", timedelta(seconds=120)
    if UNDER_TORCHRUN:
        dist.init_process_group(backend, timeout=limit)
    else:
        store = tmp_path_factory.mktemp("world") / "store"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1, timeout=limit)
    yield dist.get_world_size()
    dist.destroy_process_group()


class Here:
    """In the place of the rank pool: this process is one of the ranks, and looks at its own result only."""

    @staticmethod
    def run(world, function, *args):
        return [function(dist.get_rank(), world, *args)]


def plan_of(world: int, kind: str, scale: int = 1) -> Plan:
    """Documents over all ranks, over one of two nodes, and at home; `scale` makes them longer."""
    nodes = (world // 2, world // 2) if world > 1 and world % 2 == 0 else (world,)
    whole, first, last = Block(0, world), Block(0, nodes[0]), Block(world - 1, 1)
    lengths = (30 * world * scale, 11 * scale, 9 * world * scale, 7 * nodes[0] * scale + 1, 5)
    blocks = {
        "ulysses": [(whole, first), (whole, last), (whole, whole), (first, first), (last, last)],
        "kv_gather": [(whole, whole), (last, last), (whole, whole), (first, first), (last, last)],
        "hsap": [(whole, first), (whole, last), (whole, first), (whole, first), (last, last)],
    }[kind]
    placements = [Placement(i, n, *b, n - 1, kind) for i, (n, b) in enumerate(zip(lengths, blocks, strict=True))]
    return Plan(nodes, (Round(tuple(placements[:3])), Round(tuple(placements[3:]), "full")))


@on_a_gpu
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (128, 0), (1, 0), (128, 4)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 4)])
@pytest.mark.usefixtures("world")
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
    expected = layer_oracle.attention(*exact.split(sizes, 1), LENGTHS, window=window, sinks=sinks)
    expected.backward(grad.double().cpu())
    assert select_backend("cuda", torch.bfloat16, sinks=sinks > 0) != "exact"
    for a, b in ((got, expected), (half.grad, exact.grad)):
        assert (a.double().cpu() - b).abs().max() <= 0.02 * b.abs().max()


@pytest.mark.parametrize("shard", ["none", "world"])
@pytest.mark.parametrize(("kind", "pattern"), [("ulysses", "FS"), ("kv_gather", "LF")])
def test_fp64_steps_over_several_ranks_have_the_loss_and_gradients_of_one(world, kind, pattern, shard):
    """Every all-to-all, gather and reduction of a step, to the tenth digit."""
    if world == 1:
        pytest.skip("one rank exchanges nothing: torchrun --nproc-per-node N -m pytest tests/test_gpu.py")
    model = tiny_model(
        pattern=pattern, heads=2 * world, kv_heads=2, window=4, sinks=2, qk_norm=True, linear_conv=4,
        linear_decay="gate", linear_chunk=4,
    )  # fmt: skip
    case = Case(model, TrainSection(dtype="float64", shard=shard, chunk_tokens=16), device=DEVICE)
    (ledger,) = check(Here, case, plan_of(world, kind), 1e-9)
    assert sum(ledger["exchanged"].values()) + sum(ledger["collected"].values()) > 0


@pytest.mark.parametrize("kind", ["ulysses", "kv_gather", "hsap"])
def test_bf16_steps_have_gradients_near_those_of_fp64(world, kind):
    """Real kernels, on any number of ranks; hsap over nodes exists in bf16 only."""
    model = ModelConfig(
        pattern="FSLF", layers=4, width=128, heads=8, kv_heads=2, head_dim=64, window=32, sinks=2, qk_norm=True,
        ffn_width=64, vocabulary=257, linear_conv=4, linear_decay="gate", linear_norm=True, linear_feature="silu",
    )  # fmt: skip
    case, plan = Case(model, TrainSection(dtype="bfloat16"), device=DEVICE), plan_of(world, kind, scale=3)
    _, grads = oracle(Case(model), plan)
    ((_, seen, _),) = Here.run(world, gradients_on_rank, case, plan)
    for name, right in grads.items():
        assert_near([seen[name]], [right], GRADIENTS, name)


@pytest.mark.parametrize("shard", ["none", "world"])
def test_training_in_bf16_lowers_the_loss_with_the_same_weights_on_every_rank(world, shard):
    model = ModelConfig(layers=4, experts=4, width=128, heads=8, kv_heads=2, head_dim=64, window=64)
    case = Case(model, TrainSection(dtype="bfloat16", shard=shard, lr=1e-2, warmup_steps=0), device=DEVICE)
    plan = plan_of(world, "ulysses", scale=3)
    ((losses, weights),) = Here.run(world, losses_on_rank, case, [plan.at(i, None, None) for i in range(8)])
    assert losses[-1] < losses[0] - 0.1
    every: list = [None] * world
    dist.all_gather_object(every, {name: float(np.abs(w).sum()) for name, w in weights.items()})
    assert every == every[:1] * world
