"""Attention over parts of the keys: merged parts give the whole, and the whole's gradients fall apart into theirs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raypack.errors import RaypackError
from raypack.kernels import partial
from raypack.kernels.packing import Span
from raypack.layers.oracle import attention as oracle

HEADS = st.sampled_from([(4, 4), (4, 1), (6, 2), (1, 1)])


def tensors(rows: int, heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as strided views of one packed tensor, and a gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, heads + 2 * kv_heads, 8, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64).to(dtype)
    return *qkv.split([heads, kv_heads, kv_heads], 1), grad


def by_parts(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, cuts: list[int], length: int) -> list[Tensor]:
    """Output and gradients of one document: the rows between cuts over themselves, then over each range before them."""
    ranges = list(pairwise([0, *cuts, length]))
    own = [Span(a, b, a, b, causal=True) for a, b in ranges if b > a]
    before = [Span(a, b, c, d) for a, b in ranges for c, d in ranges if d <= a and b > a and d > c]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros(q.shape, dtype=wide), torch.full(q.shape[:2], -torch.inf, dtype=wide)
    for spans in (own, before):
        for span, part in zip(spans, partial.forward(q, k, v, spans, 0.3) if spans else [], strict=True):
            partial.merge(out[span.query : span.query_end], lse[span.query : span.query_end], part)
    grads = [torch.zeros(x.shape, dtype=wide) for x in (q, k, v)]
    for spans in (own, before):
        if spans:
            partial.backward(grad, q, k, v, out.to(q.dtype), lse, spans, 0.3, *grads)
    return [out, *grads]


def expected(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, length: int) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = oracle(*leaves, [length], scale=0.3)
    out.backward(grad.double())
    return [out.detach(), *(x.grad for x in leaves)]


@given(st.integers(1, 40), HEADS, st.data())
def test_any_parts_of_a_document_give_its_output_and_gradients(length, heads, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    given_ = tensors(length, *heads, torch.float64)
    for got, exact in zip(by_parts(*given_, cuts, length), expected(*given_, length), strict=True):
        assert torch.allclose(got, exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_is_merged_in_fp32(dtype, tolerance):
    given_ = tensors(90, 4, 2, dtype)
    for got, exact in zip(by_parts(*given_, [20, 21, 70], 90), expected(*given_, 90), strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).abs().max() <= tolerance * exact.abs().max()


def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
    """torch's flash varlen kernel in dense maths; outputs as its registered shapes say: lse [heads, queries]."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == tuple(int(cu.diff().max()) for cu in (cu_q, cu_k))
    assert (dropout, debug) == (0.0, False)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for rows, keys, scores in _scores(q, k, cu_q, cu_k, causal, scale):
        lse[:, rows] = torch.logsumexp(scores, -1).float()
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1).double()
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse, None, None, None


def flash_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, state, unused, *, scale):
    assert lse.shape == (q.shape[1], len(q))
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
    share = q.shape[1] // k.shape[1]
    delta = (grad.double() * out.double()).sum(-1).T
    for rows, keys, scores in _scores(q, k, cu_q, cu_k, causal, scale):
        p = torch.exp(scores - lse[:, rows, None])
        values, into = (x[keys].repeat_interleave(share, 1).double() for x in (v, k))
        ds = p * (torch.einsum("qhd,khd->hqk", grad[rows].double(), values) - delta[:, rows, None]) * scale
        grads[0][rows] += torch.einsum("hqk,khd->qhd", ds, into)
        grads[1][keys] += torch.einsum("hqk,qhd->khd", ds, q[rows].double()).unflatten(1, (-1, share)).sum(2)
        grads[2][keys] += torch.einsum("hqk,qhd->khd", p, grad[rows].double()).unflatten(1, (-1, share)).sum(2)
    return tuple(g.to(q.dtype) for g in grads)


def _scores(q, k, cu_q, cu_k, causal, scale):
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        keys = k[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1).double()
        scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), keys) * scale
        if causal:
            assert b - a == d - c
            scores = scores.masked_fill(torch.ones(b - a, d - c).triu(1).bool(), -torch.inf)
        yield slice(a, b), slice(c, d), scores


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_the_cuda_path_keeps_the_conventions_of_torchs_flash_kernel(monkeypatch, heads):
    """On a stand-in with the kernel's argument order, offsets and shapes; the kernel itself needs a GPU."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    monkeypatch.setattr(partial, "_on_cpu", lambda x: False)
    given_ = tensors(61, *heads, torch.bfloat16)
    for got, exact in zip(by_parts(*given_, [7, 8, 40], 61), expected(*given_, 61), strict=True):
        assert (got - exact).abs().max() <= 3e-2 * exact.abs().max()


def test_the_stand_ins_take_what_the_real_kernels_take():
    names = {
        "_flash_attention_forward": ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
                                     "is_causal", "return_debug_mask"],
        "_flash_attention_backward": ["grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k",
                                      "max_q", "max_k", "dropout_p", "is_causal", "rng_state", "unused"],
    }  # fmt: skip
    for name, expected_names in names.items():
        schema = getattr(torch.ops.aten, name).default._schema
        assert [a.name for a in schema.arguments if not a.kwarg_only] == expected_names
        assert "scale" in [a.name for a in schema.arguments if a.kwarg_only]


def test_fp32_on_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(partial, "_on_cpu", lambda x: False)
    q, k, v, _ = tensors(4, 2, 1, torch.float32)
    with pytest.raises(RaypackError, match="takes bfloat16"):
        partial.forward(q, k, v, [Span(0, 4, 0, 4, causal=True)], 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_the_real_flash_kernel_on_a_gpu(heads):
    """bf16 keeps 8 bits: 3 % of the largest value, as for the CPU's kernel."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(700, heads[0] + 2 * heads[1], 64, generator=generator).bfloat16().cuda()
    grad = torch.randn(700, heads[0], 64, generator=generator).bfloat16().cuda()
    q, k, v = qkv.split([heads[0], heads[1], heads[1]], 1)
    ranges = list(pairwise([0, 130, 131, 512, 700]))
    spans = [[Span(a, b, a, b, causal=True) for a, b in ranges], [Span(a, b, 0, a) for a, b in ranges if a]]
    out, lse = torch.zeros(q.shape, device="cuda"), torch.full(q.shape[:2], -torch.inf, device="cuda")
    grads = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
    for each in spans:
        for span, part in zip(each, partial.forward(q, k, v, each, 0.3), strict=True):
            partial.merge(out[span.query : span.query_end], lse[span.query : span.query_end], part)
    for each in spans:
        partial.backward(grad, q, k, v, out.bfloat16(), lse, each, 0.3, *grads)
    exact = expected(*(x.cpu() for x in (q, k, v, grad)), 700)
    for got, right in zip([out, *grads], exact, strict=True):
        assert (got.cpu() - right).abs().max() <= 3e-2 * right.abs().max()
