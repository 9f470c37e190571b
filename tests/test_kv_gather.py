"""Attention of the last tokens of documents over all their tokens: the kernel behind `kv_gather`."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raypack.errors import RaypackError
from raypack.kernels import cuda as kernels_cuda
from raypack.kernels import tail as kernels_tail
from raypack.kernels.attention import attention
from raypack.kernels.packing import Packing
from raypack.layers import oracle as layer_oracle

DOCUMENTS = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0, 0, 1, 40])), min_size=1, max_size=6)


def draw_inputs(
    queries: list[int], keys: list[int], heads: int = 4, kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(len(queries) + sum(keys))
    shapes = [(sum(queries), heads, 8), (sum(keys), kv_heads, 8), (sum(keys), kv_heads, 8)]
    q, k, v = (torch.randn(shape, generator=made, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def oracle(q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int]) -> Tensor:
    """Whole documents with made-up queries in front, of which only the last rows count."""
    out = []
    for qi, ki, vi, m, n in zip(q.split(queries), k.split(keys), v.split(keys), queries, keys, strict=True):
        whole = torch.cat([qi.new_zeros(n - m, *q.shape[1:]), qi])
        out.append(layer_oracle.attention(whole, ki, vi, [n])[n - m :])
    return torch.cat(out)


@given(documents=DOCUMENTS, kv_heads=st.sampled_from([1, 2, 4]))
def test_queries_are_the_last_tokens_of_their_documents(documents, kv_heads):
    queries, keys = [m for m, _ in documents], [m + before for m, before in documents]
    q, k, v = draw_inputs(queries, keys, kv_heads=kv_heads)
    got, expected = attention(q, k, v, Packing(queries), keys=Packing(keys)), oracle(q, k, v, queries, keys)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    for mine, right in zip(
        torch.autograd.grad(got, (q, k, v), weights), torch.autograd.grad(expected, (q, k, v), weights), strict=True
    ):
        assert torch.allclose(mine, right, rtol=0, atol=1e-11)


def test_blocks_of_query_rows_add_up(monkeypatch):
    monkeypatch.setattr(kernels_tail, "ROWS", 8)
    q, k, v = draw_inputs([21], [50])
    got, expected = attention(q, k, v, [21], keys=Packing([50])), oracle(q, k, v, [21], [50])
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    for mine, right in zip(
        torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        assert torch.allclose(mine, right, rtol=0, atol=1e-11)


def test_gradients_of_a_key_are_summed_over_blocks_in_fp32():
    """896 queries over 1,024 keys: those that see 256, 512 and all of them give the first value 1, 2^-8 and 2^-8."""
    q, grad = (torch.zeros(896, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(1024, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    for seen, share in ((256, 1.0), (512, 2.0**-8), (1024, 2.0**-8)):
        grad[seen - 129] = seen * share
    attention(q, k, v.requires_grad_(), [896], keys=Packing([1024])).backward(grad)
    assert v.grad[0, 0].tolist() == [1.0078125] * 8


@pytest.mark.parametrize(("queries", "keys", "window"), [([3], [2], None), ([3, 1], [4], None), ([3], [5], 2)])
def test_fewer_keys_than_queries_other_documents_or_a_window_are_refused(queries, keys, window):
    q, k, v = draw_inputs(queries, keys)
    with pytest.raises(RaypackError, match="as many documents, each with no fewer keys than queries, and no window"):
        attention(q, k, v, queries, keys=Packing(keys), window=window)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size
):
    """flash-attn 2.1 and later: the causal mask is aligned to the bottom right corner."""
    assert causal
    assert window_size == (-1, 0)
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(queries), max(keys))
    assert softmax_scale == pytest.approx(8**-0.5)
    return oracle(q, k, v, queries, keys)


def test_flash_attn_gets_the_offsets_of_queries_and_of_keys(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    queries, keys = [3, 5, 2], [10, 5, 2]
    q, k, v = draw_inputs(queries, keys)
    out = kernels_cuda.flash_attn(q, k, v, Packing(queries), Packing(keys), None, 0, 8**-0.5)
    assert torch.allclose(out, oracle(q, k, v, queries, keys), rtol=0, atol=1e-12)
