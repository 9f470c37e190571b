"""What the CUDA adapters ask of other libraries, on stand-ins that keep those libraries' contracts in dense maths.

The kernels themselves need a GPU; the conventions (offsets, windows, grouped heads, argument names) do not.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from raypack.kernels import cuda as kernels_cuda
from raypack.kernels.packing import Packing
from raypack.layers.oracle import attention as oracle

LENGTHS = [1, 7, 20, 3]


def dense(q: Tensor, k: Tensor, v: Tensor, offsets: list[int], window: tuple[int, int], scale: float) -> Tensor:
    """Query i sees keys `[i - left, i + right]` of its sequence, -1 = no limit: the rule of flash-attn and of torch."""
    left, right = window
    share, out = q.shape[1] // k.shape[1], torch.full_like(q, torch.nan)
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    for first, last in itertools.pairwise(offsets):
        position = torch.arange(last - first)
        distance = position[:, None] - position[None]
        visible = ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
        scores = torch.einsum("qhd,khd->hqk", q[first:last], k[first:last]) * scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v[first:last])
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash-attn 2.7: `causal` sets the right side of the window to 0."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
    assert dropout_p == 0.0
    window = (window_size[0], 0) if causal else window_size
    return dense(q, k, v, cu_seqlens_q.tolist(), window, softmax_scale or q.shape[-1] ** -0.5)


def varlen_attn(*args: object, **kwargs: object) -> Tensor:
    """torch 2.13, by the signature of the real one."""
    given = inspect.signature(varlen.varlen_attn).bind(*args, **kwargs).arguments
    q, k, v, offsets = (given[name] for name in ("query", "key", "value", "cu_seq_q"))
    assert given["cu_seq_k"] is offsets
    assert offsets.dtype == torch.int32
    assert given["max_q"] == given["max_k"] == max(LENGTHS)
    assert given["enable_gqa"] or q.shape[1] == k.shape[1]
    return dense(q, k, v, offsets.tolist(), given["window_size"], given["scale"])


@pytest.fixture(params=["flash_attn", "torch_varlen"])
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    if request.param == "flash_attn":
        module = types.ModuleType("flash_attn")
        module.flash_attn_varlen_func = flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        return kernels_cuda.flash_attn
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    return kernels_cuda.torch_varlen


@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_adapters_translate_windows_documents_and_grouped_heads(
    adapter: Callable[..., Tensor], window: int | None, kv_heads: int
) -> None:
    qkv = torch.randn(sum(LENGTHS), 4 + 2 * kv_heads, 8, dtype=torch.float64)
    q, k, v = qkv.split([4, kv_heads, kv_heads], 1)
    packing = Packing(LENGTHS)
    out = adapter(q, k, v, packing, packing, window, 0, 0.3)
    assert torch.allclose(out, oracle(q, k, v, LENGTHS, window=window, scale=0.3), rtol=0, atol=1e-12)


def test_torch_varlen_of_this_torch_has_windows_and_grouped_heads() -> None:
    assert kernels_cuda.has_torch_varlen()


def test_a_flash_attn_that_does_not_load_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_cuda.has_flash_attn.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert not kernels_cuda.has_flash_attn()
    kernels_cuda.has_flash_attn.cache_clear()
