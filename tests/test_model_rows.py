"""RoPE, norms, feed-forward and cross-entropy of local rows against the oracles."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raypack.errors import RaypackError
from raypack.layers import oracle
from raypack.layers.projections import normalize_heads, rope_table, rotate
from raypack.model import reference
from raypack.model.head import linear_cross_entropy
from raypack.model.mlp import SwiGLU, run_by_rows, swiglu

F64 = torch.float64
ROWS = (0, 1, 7, 63, 100)


@pytest.fixture
def poisoned_memory():
    """Every `torch.empty` holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype).requires_grad_()


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def assert_same(fast: list[Tensor], slow: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(fast, slow, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.numel():
            assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("rows", [*ROWS, 5000])
@pytest.mark.usefixtures("poisoned_memory")
def test_rotation_equals_oracle_and_leaves_values_alone(rows: int) -> None:
    qkv = drawn(rows, 5, 8)
    positions = torch.arange(rows) % 97
    fast = gradients(rotate(qkv, rope_table(positions, 8, 1e4, F64), 4), [qkv])
    slow = gradients(torch.cat([oracle.rope(qkv[:, :4], positions, 1e4), qkv[:, 4:]], 1), [qkv])
    assert_same(fast, slow)


def test_rotation_depends_on_the_distance_only_even_far_out() -> None:
    """fp32 angles would be wrong by about 0.03 at position 500,000."""
    q, k = drawn(1, 1, 16, dtype=torch.float32).detach(), drawn(1, 1, 16, seed=1, dtype=torch.float32).detach()

    def score(query: int, key: int) -> float:
        tables = (rope_table(torch.tensor([p]), 16, 1e4, torch.float32) for p in (query, key))
        return float((rotate(q, next(tables), 1) * rotate(k, next(tables), 1)).sum())

    assert score(500_007, 500_000) == pytest.approx(score(7, 0), abs=1e-5)


def test_rotation_in_bf16_rounds_once() -> None:
    qkv = drawn(63, 3, 8, dtype=torch.bfloat16)
    out = rotate(qkv, rope_table(torch.arange(63), 8, 1e4, torch.bfloat16), 3)
    exact = oracle.rope(qkv.float(), torch.arange(63), 1e4)
    assert torch.equal(out, exact.bfloat16())


@pytest.mark.parametrize("rows", ROWS)
def test_norms_equal_oracle(rows: int) -> None:
    qkv, q_weight, k_weight = drawn(rows, 7, 4), drawn(4, seed=1), drawn(4, seed=2)
    fast = normalize_heads(qkv, 3, 2, q_weight, k_weight, 1e-6)
    slow = torch.cat(
        [
            oracle.rms_norm(qkv[:, :3], q_weight, 1e-6),
            oracle.rms_norm(qkv[:, 3:5], k_weight, 1e-6),
            qkv[:, 5:],
        ],
        1,
    )
    leaves = [qkv, q_weight, k_weight]
    assert_same(gradients(fast, leaves), gradients(slow, leaves))


def test_norm_in_bf16_squares_in_fp32() -> None:
    """256 squares of 1 summed in bf16 stop growing at 256; with the epsilon they would not divide out to 1."""
    qkv, weight = torch.ones(1, 3, 1000, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bfloat16)
    assert torch.equal(normalize_heads(qkv, 1, 1, weight, weight, 1e-6), qkv)


@pytest.mark.parametrize("chunk_tokens", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("poisoned_memory")
def test_swiglu_equals_oracle_whatever_the_chunk(rows: int, chunk_tokens: int) -> None:
    x, block = drawn(rows, 6), SwiGLU(6, 10, chunk_tokens).double()
    leaves = [x, block.gate_up.weight, block.down.weight]
    assert_same(gradients(block(x), leaves), gradients(reference.swiglu(*leaves), leaves))


def test_chunked_rows_save_no_hidden_values_and_sum_weight_gradients_wide() -> None:
    """1,000 one-row chunks whose weight gradients are 1: a bf16 sum would stop at 256."""
    x, weight = torch.ones(1000, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = run_by_rows(lambda x, w: (x @ w.expand(1, 50)).mean(1, keepdim=True), 1, (x,), (weight,))
    out.sum().backward()
    assert weight.grad.item() == 1000
    assert max(saved) <= 1000


def test_chunked_rows_skip_gradients_nobody_asked_for() -> None:
    x, gate_up, down = drawn(9, 4).detach(), drawn(6, 4), drawn(4, 3).detach()
    run_by_rows(swiglu, 2, (x,), (gate_up, down)).sum().backward()
    whole = drawn(6, 4)
    swiglu(x, whole, down).sum().backward()
    assert_same([gate_up.grad], [whole.grad])
    assert x.grad is None
    assert down.grad is None


@given(labels=st.lists(st.integers(0, 10) | st.just(-100), max_size=70), chunk=st.sampled_from([1, 7, 64, 1000]))
def test_chunked_cross_entropy_equals_oracle(labels: list[int], chunk: int) -> None:
    label = torch.tensor(labels, dtype=torch.int64)
    x, weight = drawn(len(labels), 6), drawn(11, 6, seed=1)
    fast = linear_cross_entropy(x, weight, label, chunk)
    slow = reference.cross_entropy(x, weight, label)
    assert_same(
        [fast.detach(), *torch.autograd.grad(fast * 0.3, [x, weight])],
        [slow.detach(), *torch.autograd.grad(slow * 0.3, [x, weight])],
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
def test_cross_entropy_in_low_precision_rounds_only_its_results(dtype: torch.dtype, tolerance: float) -> None:
    """Loss within fp32 of the oracle on the same (rounded) inputs; bf16 gradients rounded once, by up to 2**-9."""
    x, weight, labels = drawn(100, 16, dtype=dtype), drawn(50, 16, seed=1, dtype=dtype), torch.arange(100) % 50
    loss = linear_cross_entropy(x, weight, labels, 16)
    wide = [x.detach().to(F64).requires_grad_(), weight.detach().to(F64).requires_grad_()]
    exact = reference.cross_entropy(*wide, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    grads = [g.to(F64) for g in torch.autograd.grad(loss, [x, weight])]
    assert_same(grads, list(torch.autograd.grad(exact, wide)), tolerance)


def test_the_heads_gradient_is_summed_over_chunks_in_fp32() -> None:
    """600 chunks of one row that add 1/2 each: a bf16 sum would stop at 128."""
    x, weight = torch.ones(600, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(x, weight, torch.ones(600, dtype=torch.int64), 1).backward()
    assert weight.grad.flatten().tolist() == [300, -300]


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_no_valid_label_is_zero_loss_and_zero_gradients_not_nan(rows: int) -> None:
    x, weight = drawn(rows, 4), drawn(5, 4)
    loss = linear_cross_entropy(x, weight, torch.full((rows,), -100), 3)
    loss.backward()
    assert loss.item() == 0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_loss_is_a_sum_that_ignores_how_rows_are_shared_out() -> None:
    """Rank 0: 4 valid tokens, rank 1: none. The global mean is rank 0's, and finite."""
    x, weight = torch.zeros(6, 3, dtype=F64), torch.zeros(7389, 3, dtype=F64)
    labels = torch.tensor([0, 1, 2, 3, -100, -100])
    total = sum(linear_cross_entropy(a, weight, b, 2) for a, b in zip(x.split(4), labels.split(4), strict=True))
    assert float(total) / 4 == pytest.approx(math.log(len(weight)))
    assert torch.equal(linear_cross_entropy(x, weight, labels, 100), total)


def test_cross_entropy_never_holds_more_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = torch.logsumexp
    monkeypatch.setattr(
        torch, "logsumexp", lambda x, *args, **kwargs: seen.append(x.shape[0]) or real(x, *args, **kwargs)
    )
    linear_cross_entropy(drawn(100, 4), drawn(9, 4), torch.arange(100) % 9, 16).backward()
    assert max(seen) == 16
    assert sum(seen) == 100


def test_cross_entropy_refuses_bad_input() -> None:
    for chunk, count, text in ((0, 3, "chunk_tokens = 0"), (1, 2, "2 labels for 3 rows")):
        with pytest.raises(RaypackError, match=text):
            linear_cross_entropy(drawn(3, 2), drawn(4, 2), torch.zeros(count, dtype=torch.int64), chunk)
