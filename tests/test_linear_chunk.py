"""Chunked linear attention on one rank against the token-by-token oracle: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raypack.layers.linear import chunk as linear_chunk
from raypack.layers.linear import oracle as linear_oracle
from raypack.layers.linear.chunk import entered, inside, state_of

KINDS = ("none", "head", "gate", "strong gate")
LENGTHS = st.one_of(
    st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from([[7, 63, 100], [257], [1, 1, 1, 130]])
)


def draw_inputs(kind: str, rows: int, heads: int = 4, kv_heads: int = 2, dim: int = 4, dtype=torch.float64, seed=0):
    """q [n, K, G, D], k, v, and log decays as `linear_chunk` takes them; all that can have gradients do."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype).requires_grad_()

    q = normal(rows, kv_heads, heads // kv_heads, dim)
    k, v = normal(rows, kv_heads, dim), normal(rows, kv_heads, dim)
    g = None
    if kind == "head":
        g = torch.linspace(-0.7, -0.01, kv_heads, dtype=dtype)
    elif kind != "none":
        strength = 40.0 if kind == "strong gate" else 0.5
        gates = -strength * torch.rand(rows, kv_heads, dim, generator=made, dtype=torch.float64)
        g = gates.to(dtype).requires_grad_()
    return q, k, v, g


def pieces_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def oracle(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, lengths: list[int]) -> Tensor:
    return linear_oracle.linear_attention(q.flatten(1, 2), k, v, lengths, g).view_as(q)


def gradients(out: Tensor, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    return torch.autograd.grad(out, leaves, weights)


@settings(max_examples=50)
@given(
    kind=st.sampled_from(KINDS),
    lengths=LENGTHS,
    chunk=st.sampled_from([1, 2, 8, 64]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
)
def test_chunks_of_any_size_give_the_outputs_and_gradients_of_the_recurrence(kind, lengths, chunk, heads):
    inputs = draw_inputs(kind, sum(lengths), *heads)
    got, expected = inside(*inputs, pieces_of(lengths), chunk), oracle(*inputs, lengths)
    assert torch.allclose(got, expected, rtol=0, atol=1e-11)
    for mine, right in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        assert torch.allclose(mine, right, rtol=0, atol=1e-11 * (1 + right.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_states_go_from_block_to_block(kind, monkeypatch):
    monkeypatch.setattr(linear_chunk, "BLOCK_ROWS", 32)
    lengths = [20, 1, 75, 33]
    inputs = draw_inputs(kind, sum(lengths))
    got, expected = inside(*inputs, pieces_of(lengths), 8), oracle(*inputs, lengths)
    assert torch.allclose(got, expected, rtol=0, atol=1e-11)
    for mine, right in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        assert torch.allclose(mine, right, rtol=0, atol=1e-10)


@settings(max_examples=30)
@given(kind=st.sampled_from(KINDS), rows=st.integers(0, 40), cut=st.integers(0, 40))
def test_a_document_cut_anywhere_is_the_sum_of_what_enters_and_what_is_inside(kind, rows, cut):
    cut = min(cut, rows)
    inputs = draw_inputs(kind, rows)
    whole = oracle(*inputs, [rows])

    def part(rows: slice) -> list[Tensor | None]:
        return [x if x is None or (x is inputs[3] and x.dim() == 1) else x[rows] for x in inputs]

    (q0, k0, v0, g0), (q1, k1, v1, g1) = part(slice(cut)), part(slice(cut, None))
    first = inside(q0, k0, v0, g0, pieces_of([cut]), 8)
    second = inside(q1, k1, v1, g1, pieces_of([rows - cut]), 8) + entered(q1, g1, state_of(k0, v0, g0))
    got = torch.cat([first, second])
    assert torch.allclose(got, whole, rtol=0, atol=1e-11)
    if rows:
        for mine, right in zip(gradients(got, inputs), gradients(whole, inputs), strict=True):
            assert torch.allclose(mine, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["gate", "strong gate"])
def test_gates_of_any_strength_stay_finite_and_exact_in_fp32(kind):
    """A chunk of 64 rows with gates of e^-40: factored as exp(+sum) x exp(-sum) it would overflow."""
    exact = draw_inputs(kind, 200)
    single = [x.detach().to(torch.float32).requires_grad_() for x in exact if x is not None]
    got = inside(*single, pieces_of([150, 50]), 64)
    expected = oracle(*exact, [150, 50])
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)
    for mine, right in zip(gradients(got, tuple(single)), gradients(expected, exact), strict=True):
        assert torch.isfinite(mine).all()
        assert torch.allclose(mine.double(), right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))


def test_decay_of_one_half_over_documents_of_3_and_5():
    ones = torch.ones(8, 1, 1, dtype=torch.float64)
    got = inside(ones[:, None], ones, ones, torch.tensor([0.5]).double().log(), pieces_of([3, 5]), 4)
    assert got.flatten().tolist() == pytest.approx([1, 1.5, 1.75, 1, 1.5, 1.75, 1.875, 1.9375])


def test_a_thousand_ones_add_up_to_a_thousand():
    """A bf16 running sum would stop at 256."""
    ones = torch.ones(1000, 1, 1)
    out = inside(ones[:, None], ones, ones, None, pieces_of([1000]), 64)
    assert out[-1].item() == 1000
    assert state_of(ones, ones, None).item() == 1000


def test_documents_without_tokens_and_no_rows_at_all():
    inputs = draw_inputs("gate", 8)
    got = inside(*inputs, pieces_of([3, 0, 5]), 4)
    assert torch.allclose(got, oracle(*inputs, [3, 5]), rtol=0, atol=1e-12)
    empty = draw_inputs("gate", 0)
    out = inside(*empty, torch.zeros(0, dtype=torch.int64), 4)
    assert out.shape == (0, 2, 2, 4)
    assert all(x.shape == y.shape for x, y in zip(gradients(out, empty), empty, strict=True))
