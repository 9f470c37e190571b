"""Mixture of experts against the token-by-token oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from raypack.errors import RaypackError
from raypack.model import moe as expert_work
from raypack.model import reference
from raypack.model.moe import MoE, Routing, choose, expert_counts, grouped_linear

F64 = torch.float64


@pytest.fixture
def poisoned_memory():
    """Every `torch.empty` holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def made(dtype: torch.dtype = F64, chunk_tokens: int = 0, shared: int = 0, width: int = 8, hidden: int = 12) -> MoE:
    torch.manual_seed(0)
    moe = MoE(width, 6, 2, hidden, shared, chunk_tokens).to(dtype)
    moe.bias.copy_(torch.linspace(-0.05, 0.05, 6))
    return moe


def rows(count: int, dtype: torch.dtype = F64, width: int = 8, seed: int = 1) -> Tensor:
    return torch.randn((count, width), generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def everything(out: Tensor, x: Tensor, moe: MoE) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [x, *moe.parameters()])]


def assert_same(fast: list[Tensor], slow: list[Tensor], tolerance: float) -> None:
    for a, b in zip(fast, slow, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("chunk_tokens", [0, 1, 16])
@pytest.mark.parametrize("shared", [0, 10])
@pytest.mark.parametrize("count", [1, 7, 63, 100])
@pytest.mark.usefixtures("poisoned_memory")
def test_moe_equals_the_loop_over_tokens(count: int, shared: int, chunk_tokens: int) -> None:
    moe, x = made(chunk_tokens=chunk_tokens, shared=shared), rows(count).requires_grad_()
    out, routing = moe(x)
    state = dict(moe.named_parameters()) | {"bias": moe.bias}
    slow, chosen = reference.moe(x, state, 2)
    assert torch.equal(routing.experts, chosen)
    assert routing.counts.tolist() == chosen.flatten().bincount(minlength=6).tolist()
    assert_same(everything(out, x, moe), everything(slow, x, moe), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("chunk_tokens", [0, 16])
@pytest.mark.usefixtures("poisoned_memory")
def test_low_precision_with_saved_routing_stays_near_the_fp64_oracle(
    dtype: torch.dtype, tolerance: float, chunk_tokens: int
) -> None:
    """bf16: weights, three products and their results are each rounded by up to 2**-9."""
    moe, x = made(dtype, chunk_tokens), rows(63, dtype).requires_grad_()
    out, routing = moe(x)
    exact, exact_x = made(), x.detach().to(F64).requires_grad_()
    exact.load_state_dict({name: t.to(F64) for name, t in moe.state_dict().items()})
    slow, _ = reference.moe(exact_x, dict(exact.named_parameters()), 2, routing.experts)
    fast = [t.to(F64) for t in everything(out, x, moe)]
    assert_same(fast, everything(slow, exact_x, exact), tolerance)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [0, 10])
def test_no_rows_give_every_parameter_a_zero_gradient_not_none(dtype: torch.dtype, shared: int) -> None:
    moe, x = made(dtype, shared=shared), rows(0, dtype).requires_grad_()
    out, routing = moe(x)
    out.sum().backward()
    assert out.shape == (0, 8)
    assert routing.counts.tolist() == [0] * 6
    assert all(p.grad is not None and not p.grad.any() for p in [x, *moe.parameters()])


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("poisoned_memory")
def test_an_expert_without_rows_gets_a_zero_gradient(dtype: torch.dtype) -> None:
    moe, x = made(dtype), rows(9, dtype)
    out, _ = moe(x, Routing(torch.tensor([[0, 3]] * 9), torch.tensor([9, 0, 0, 9, 0, 0])))
    out.sum().backward()
    used = [bool(moe.gate_up.grad[e].any()) for e in range(6)]
    assert used == [True, False, False, True, False, False]
    assert torch.isfinite(moe.gate_up.grad).all()


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), aligned=st.booleans(), bf16=st.booleans())
def test_grouped_product_equals_one_product_per_expert(counts: list[int], aligned: bool, bf16: bool) -> None:
    dtype, (outputs, inputs) = torch.bfloat16 if bf16 else torch.float32, (16, 8) if aligned else (5, 3)
    x = rows(sum(counts), dtype, inputs).requires_grad_()
    weight = rows(len(counts) * outputs, dtype, inputs, 2).view(len(counts), outputs, inputs).requires_grad_()
    out = grouped_linear(x, weight, torch.tensor(counts))
    parts = zip(x.split(counts), weight, strict=True)
    want = torch.cat([a @ w.T for a, w in parts])
    for a, b in zip(
        (out, *torch.autograd.grad(out.sum(), [x, weight])),
        (want, *torch.autograd.grad(want.sum(), [x, weight])),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=2**-7 if bf16 else 1e-5, atol=1e-5)


def test_the_grouped_product_of_torch_is_used_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = torch.nn.functional.grouped_mm
    monkeypatch.setattr(expert_work.F, "grouped_mm", lambda *a, **k: calls.append("grouped") or real(*a, **k))
    for dtype, hidden, want in ((torch.float32, 12, 2), (torch.bfloat16, 16, 2), (F64, 12, 0), (torch.float32, 5, 0)):
        calls.clear()
        made(dtype, hidden=hidden)(rows(9, dtype))
        assert len(calls) == want


def test_a_bf16_model_routes_by_fp32_scores() -> None:
    """Logits of 1 and 1 + 2^-10: in bf16 a tie, which would go to the first."""
    moe = MoE(2, 2, 1, 4).to(torch.bfloat16)
    moe.router.weight.data.copy_(torch.tensor([[1, 0], [1, 2.0**-10]]))
    assert moe(torch.ones(1, 2, dtype=torch.bfloat16))[1].experts.tolist() == [[1]]


def test_a_rows_copies_are_summed_in_fp32() -> None:
    """Forward: outputs of three experts, weighed 1, 2^-8 and 2^-8. Backward: the same as gradients."""
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    gates = torch.tensor([[1, 2.0**-8, 2.0**-8]])
    order = torch.arange(3)
    assert expert_work._Combine.apply(x.expand(3, 8), gates, order, order).tolist() == [[1.0078125] * 8]
    copies = expert_work._Dispatch.apply(x.requires_grad_(), order, order, 3)
    copies.backward(gates.T.expand(3, 8).to(torch.bfloat16))
    assert x.grad.tolist() == [[1.0078125] * 8]


def test_ties_go_to_the_lowest_expert() -> None:
    scores = torch.tensor([[0.5] * 8, [0.1, 0.9, 0.9, 0.1, 0.9, 0.1, 0.1, 0.9]])
    assert choose(scores, torch.zeros(8), 2).tolist() == [[0, 1], [1, 2]]
    assert choose(scores, torch.tensor([0.0] * 7 + [0.25]), 2).tolist() == [[7, 0], [7, 1]]


def test_bias_chooses_but_does_not_weigh() -> None:
    moe, x = made(), rows(20)
    before, routing = moe(x)
    moe.bias.copy_(torch.tensor([9.0, 0, 0, 0, 0, 9]))
    forced, other = moe(x)
    assert set(other.experts.flatten().tolist()) == {0, 5}
    assert not torch.equal(before, forced)
    assert torch.equal(moe(x, routing)[0], before)


def test_given_routing_is_replayed_bit_for_bit_with_router_gradients() -> None:
    moe, x = made(torch.float32), rows(33, torch.float32).requires_grad_()
    first, routing = moe(x)
    moe.bias += torch.linspace(0.5, -0.5, 6)
    again, same = moe(x, routing)
    assert same is routing
    original, replayed = everything(first, x, moe), everything(again, x, moe)
    assert all(torch.equal(a, b) for a, b in zip(original, replayed, strict=True))
    names = ["out", "x", *(name for name, _ in moe.named_parameters())]
    assert replayed[names.index("router.weight")].any()


def test_rows_do_not_see_each_other() -> None:
    """Causality through the feed-forward part: the order and the company of rows change nothing."""
    moe, x = made(), rows(40)
    whole = moe(x)[0]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(moe(x[order])[0], whole[order], rtol=0, atol=1e-14)
    assert torch.allclose(torch.cat([moe(part)[0] for part in x.split(9)]), whole, rtol=0, atol=1e-14)


def test_bias_moves_towards_balance_by_at_most_the_rate() -> None:
    moe = MoE(8, 4, 2, 4)
    moe.update_bias(torch.tensor([10, 20, 60, 10]), 0.1)
    assert moe.bias.tolist() == pytest.approx([0.06, 0.02, -0.1, 0.06])
    moe.update_bias(torch.zeros(4, dtype=torch.int64), 0.1)
    assert moe.bias.tolist() == pytest.approx([0.06, 0.02, -0.1, 0.06])


def test_bias_balances_a_skewed_router() -> None:
    moe, x = made(torch.float32), rows(512, torch.float32) + 0.5
    with torch.no_grad():
        moe.router.weight[0] += 0.3
        moe.bias.zero_()
    spread = []
    for _ in range(200):
        counts = moe(x)[1].counts
        spread.append(float(counts.max() / counts.float().mean()))
        moe.update_bias(counts, 0.02)
    assert spread[-1] < 1.2 < spread[0]


def test_bias_stays_wide_in_a_model_of_any_dtype() -> None:
    moe = MoE(8, 4, 2, 4)
    moe.bias += 1 + 2**-20
    assert moe.to(torch.bfloat16).bias.tolist() == [1 + 2**-20] * 4
    assert moe.router.weight.dtype == torch.bfloat16
    assert moe.double().bias.dtype == F64
    with torch.device("meta"):
        empty = MoE(8, 4, 2, 4)
    assert empty.to_empty(device="cpu").bias.dtype == torch.float32


def test_counts_of_shards_add_up_to_counts_of_the_whole() -> None:
    moe, x = made(), rows(50)
    whole = moe(x)[1].counts
    for parts in (2, 4, 7):
        assert torch.equal(sum(moe(part)[1].counts for part in x.tensor_split(parts)), whole)
    assert torch.equal(expert_counts(torch.tensor([[3, 0], [3, 1]]), 5), torch.tensor([1, 1, 0, 2, 0]))


def test_more_experts_chosen_than_exist_is_refused() -> None:
    with pytest.raises(RaypackError, match=r"experts_active = 5: must lie in 1\.\.4"):
        MoE(8, 4, 5, 4)


@pytest.mark.parametrize("chunk_tokens", [0, 8])
def test_recompute_with_saved_routing_gives_bit_equal_gradients(chunk_tokens: int) -> None:
    """The bias moves between forward and replay here: without the saved routing the replay would choose otherwise."""
    moe, x = made(torch.float32, chunk_tokens, shared=6), rows(33, torch.float32).requires_grad_()
    out, routing = moe(x)
    plain = everything(out, x, moe)
    replayed = checkpoint(lambda x: moe(x, routing)[0], x, use_reentrant=False)
    moe.bias += torch.linspace(0.5, -0.5, 6)
    assert not torch.equal(moe(x)[1].experts, routing.experts)
    assert all(torch.equal(a, b) for a, b in zip(plain, everything(replayed, x, moe), strict=True))
