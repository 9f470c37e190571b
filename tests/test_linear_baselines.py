"""The baselines of the benchmarks compute what raypack computes: one oracle holds them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.baselines import lasp1, lasp1_published, linear_ring, ring
from benchmarks.baselines.neighbours import Ring
from raypack.layers import oracle as layer_oracle
from raypack.layers.linear import oracle as linear_oracle

pytestmark = pytest.mark.pool

RANKS, TOKENS, HEADS, KV_HEADS, DIM = 4, 48, 4, 2, 3


def inputs() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "weight": HEADS}
    return {name: torch.randn(TOKENS, n, DIM, generator=made, dtype=torch.float64) for name, n in heads.items()}


def decay_of(name: str) -> torch.Tensor | None:
    return torch.tensor([-0.3, -0.02], dtype=torch.float64) if name == "head" else None


def baseline_on_rank(rank: int, world: int, method: str, decay: str) -> dict[str, Any]:
    rows = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    parts = {name: x[rows].clone().requires_grad_(name != "weight") for name, x in inputs().items()}
    q, k, v = parts["q"], parts["k"], parts["v"]
    counted = Ring(dist.group.WORLD)
    if method == "ring":
        out = ring.attention(q, k, v, counted)
    else:
        module = {"lasp1": lasp1, "lasp1_published": lasp1_published, "linear_ring": linear_ring}[method]
        grouped = q.unflatten(1, (KV_HEADS, HEADS // KV_HEADS))
        out = module.attention(grouped, k, v, decay_of(decay), counted, 4).flatten(1, 2)
    grads = torch.autograd.grad((out * parts["weight"]).sum(), (q, k, v))
    found = {"out": out.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    return {"steps": counted.steps, "sent": counted.sent, **{name: x.numpy() for name, x in found.items()}}


def oracle(method: str, decay: str) -> dict[str, np.ndarray]:
    parts = {name: x.requires_grad_(name != "weight") for name, x in inputs().items()}
    q, k, v = parts["q"], parts["k"], parts["v"]
    if method == "ring":
        out = layer_oracle.attention(q, k, v, [TOKENS])
    else:
        out = linear_oracle.linear_attention(q, k, v, [TOKENS], decay_of(decay))
    grads = torch.autograd.grad((out * parts["weight"]).sum(), (q, k, v))
    found = {"out": out.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    return {name: x.numpy() for name, x in found.items()}


@pytest.mark.parametrize(
    ("method", "decay"),
    [
        *((method, decay) for method in ("lasp1", "lasp1_published", "linear_ring") for decay in ("none", "head")),
        ("ring", "none"),
    ],
)
def test_every_baseline_gives_the_outputs_and_gradients_of_the_oracle(pool, method, decay):
    right = oracle(method, decay)
    results = pool.run(RANKS, baseline_on_rank, method, decay)
    for name, expected in right.items():
        got = np.concatenate([r[name] for r in results])
        assert np.allclose(got, expected, rtol=0, atol=1e-11), name


def test_baselines_count_what_they_send(pool):
    """LASP-1: a state a hop; rings: every shard's K and V, and their gradients, past every rank."""
    state, shard = KV_HEADS * DIM * DIM * 8, 2 * TOKENS // RANKS * KV_HEADS * DIM * 8
    for method in ("lasp1", "lasp1_published"):
        results = pool.run(RANKS, baseline_on_rank, method, "none")
        assert [r["sent"] for r in results] == [state, 2 * state, 2 * state, state]
        assert {r["steps"] for r in results} == {2 * (RANKS - 1)}
    for method in ("linear_ring", "ring"):
        results = pool.run(RANKS, baseline_on_rank, method, "none")
        assert {r["steps"] for r in results} == {RANKS - 1 + RANKS}
        assert {r["sent"] for r in results} == {shard * (2 * (RANKS - 1) + RANKS)}
