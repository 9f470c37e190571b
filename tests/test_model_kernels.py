"""Attention kernels against the dense one-rank oracle."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raypack.errors import RaypackError
from raypack.kernels import cuda as kernels_cuda
from raypack.kernels.attention import attention, select_backend
from raypack.kernels.cuda import cu_seqlens
from raypack.kernels.exact import chunks
from raypack.kernels.packing import Packing
from raypack.layers.oracle import attention as oracle


def projected(
    tokens: int, heads: int, kv_heads: int, dim: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn((tokens, heads + 2 * kv_heads, dim), generator=generator, dtype=torch.float64)
    return qkv.to(dtype).requires_grad_()


def both(qkv: Tensor, heads: int, kv_heads: int, lengths: list[int], **kwargs: object) -> tuple[list[Tensor], ...]:
    """[output, gradient of the packed tensor] of the fast path and of the oracle."""
    results = []
    for function in (attention, oracle):
        leaf = qkv.detach().clone().requires_grad_()
        q, k, v = leaf.split([heads, kv_heads, kv_heads], 1)
        out = function(q, k, v, lengths, **kwargs)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * weight).sum().backward()
        results.append([out.detach(), leaf.grad])
    return tuple(results)


def assert_same(fast: list[Tensor], slow: list[Tensor], tolerance: float) -> None:
    for a, b in zip(fast, slow, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


@pytest.fixture
def poisoned_memory():
    """Every `torch.empty` holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


LENGTHS = [[1], [7], [63], [100], [1, 7, 63, 100], [300, 1, 1, 257, 2, 256, 400], [1] * 50]


@pytest.mark.parametrize("window", [None, 1, 4, 16, 1000])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_fast_attention_equals_oracle_in_fp64(lengths: list[int], window: int | None) -> None:
    fast, slow = both(projected(sum(lengths), 4, 2), 4, 2, lengths, window=window)
    assert_same(fast, slow, 1e-12)


@pytest.mark.parametrize("sinks", [1, 3, 20])
@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.usefixtures("poisoned_memory")
def test_sinks_equal_oracle_in_fp64(window: int, sinks: int) -> None:
    lengths = [7, 300, 1, 9, 12, 63, 270]
    fast, slow = both(projected(sum(lengths), 4, 2), 4, 2, lengths, window=window, sinks=sinks)
    assert_same(fast, slow, 1e-12)


@given(
    lengths=st.lists(st.integers(1, 90) | st.integers(250, 270), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 300),
    sinks=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_any_packing_equals_oracle(
    lengths: list[int], window: int | None, sinks: int, kv_heads: int, share: int, seed: int
) -> None:
    heads = kv_heads * share
    qkv = projected(sum(lengths), heads, kv_heads, 4, seed=seed)
    fast, slow = both(qkv, heads, kv_heads, lengths, window=window, sinks=sinks)
    assert_same(fast, slow, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 16])
def test_low_precision_stays_near_the_fp64_oracle(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    """bf16 keeps 8 bits, so inputs, output and gradients are each rounded by up to 2**-9; nothing in between is."""
    lengths, wide = [100, 300, 1, 7], torch.float64
    low = projected(sum(lengths), 4, 2, dtype=dtype)
    fast, _ = both(low, 4, 2, lengths, window=window)
    _, slow = both(low.to(wide), 4, 2, lengths, window=window)
    assert all(x.dtype == dtype for x in fast)
    assert_same([x.to(wide) for x in fast], slow, tolerance)


def test_gradients_of_a_key_that_several_chunks_saw_are_summed_in_fp32() -> None:
    """Queries 127, 255 and 511 weigh the first value by 1/128, 1/256 and 1/512, and give it 1, 2^-8 and 2^-8; a bf16
    sum would drop both small terms."""
    q, k, v, grad = (torch.zeros(520, 1, 8, dtype=torch.bfloat16) for _ in range(4))
    for query, share in ((127, 1.0), (255, 2.0**-8), (511, 2.0**-8)):
        grad[query] = (query + 1) * share
    attention(q, k, v.requires_grad_(), [520], window=512).backward(grad)
    assert v.grad[0, 0].tolist() == [1.0078125] * 8


def test_gradients_of_a_kv_heads_uneven_query_heads_are_summed_in_fp32() -> None:
    q, v = torch.zeros(1, 4, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.tensor([1, 2.0**-8, 2.0**-8, 3], dtype=torch.bfloat16).view(1, 4, 1).expand(1, 4, 8)
    attention(q, v.detach(), v, [1], kv_of_q=(0, 0, 0, 1)).backward(grad)
    assert v.grad[0, :, 0].tolist() == [1.0078125, 3]


@pytest.mark.parametrize("kv_of_q", [(0, 0, 1), (0, 1, 1, 1), (0, 0, 0, 2), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 4])
def test_uneven_query_heads_use_their_kv_head(kv_of_q: tuple[int, ...], window: int | None) -> None:
    lengths, kv_heads = [7, 63], max(kv_of_q) + 1
    qkv = projected(70, len(kv_of_q), kv_heads)
    fast, slow = both(qkv, len(kv_of_q), kv_heads, lengths, window=window, kv_of_q=kv_of_q)
    assert_same(fast, slow, 1e-12)


@pytest.mark.parametrize(
    ("lengths", "want"), [([8], [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]), ([3, 5], [0, 0.5, 1, 3, 3.5, 4, 4.5, 5.5])]
)
@pytest.mark.parametrize("backend", [attention, oracle])
def test_window_stops_at_document_start_and_counts_the_token_itself(lengths, want, backend) -> None:
    q = torch.zeros((8, 1, 2), dtype=torch.float64)
    v = torch.arange(8.0, dtype=torch.float64).view(8, 1, 1).expand(8, 1, 2)
    assert backend(q, q, v, lengths, window=4)[:, 0, 0].tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("backend", [attention, oracle])
def test_window_of_four_at_position_five_sees_keys_two_to_five(window: int, backend) -> None:
    q = torch.zeros((9, 1, 9), dtype=torch.float64)
    v = torch.eye(9, dtype=torch.float64).unsqueeze(1)
    seen = backend(q, q, v, [9], window=window)[5, 0].nonzero().flatten().tolist()
    assert seen == list(range(6 - window, 6))


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (4, 2)])
@pytest.mark.parametrize("changed", [0, 5, 299, 300, 310])
def test_changing_a_token_leaves_earlier_outputs_and_other_documents_bit_equal(window, sinks, changed: int) -> None:
    lengths = [300, 40]
    qkv = projected(340, 2, 1).detach()
    other = qkv.clone()
    other[changed] += 1
    before, after = (attention(*x.split([2, 1, 1], 1), lengths, window=window, sinks=sinks) for x in (qkv, other))
    same = (before == after).all(-1).all(-1)
    end = 300 if changed < 300 else 340
    assert same[:changed].all()
    assert same[end:].all()
    assert not same[changed]


@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(0, 4, 2), (5, 0, 0), (5, 0, 2), (0, 0, 0)])
@pytest.mark.parametrize("window", [None, 4])
def test_no_rows_or_heads_give_zero_gradients_not_none(tokens: int, heads: int, kv_heads: int, window) -> None:
    parts = [torch.full((tokens, n, 8), math.nan, requires_grad=True) for n in (heads, kv_heads, kv_heads)]
    out = attention(*parts, [tokens], window=window)
    assert out.shape == (tokens, heads, 8)
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in parts)


def test_many_one_token_documents_copy_their_value() -> None:
    qkv = projected(1000, 4, 2).detach()
    q, k, v = qkv.split([4, 2, 2], 1)
    assert torch.equal(attention(q, k, v, [1] * 1000), v.repeat_interleave(2, 1))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 50),
    sinks=st.integers(0, 6),
    rows=st.sampled_from([1, 4, 16]),
)
def test_a_chunk_holds_each_key_its_queries_see_exactly_once(lengths, window, sinks, rows) -> None:
    lengths = tuple(lengths)
    document = [(i, sum(lengths[:i])) for i, n in enumerate(lengths) for _ in range(n)]
    plan = chunks(lengths, window, sinks if window else 0, rows)
    assert [r for c in plan for r in range(c.first, c.last)] == list(range(sum(lengths)))
    for chunk in plan:
        keys = [*range(chunk.sink, chunk.sink_last), *range(chunk.key, chunk.last)]
        assert len(keys) == len(set(keys))
        for query in range(chunk.first, chunk.last):
            start = document[query][1]
            needed = {j for j in range(start, query + 1) if not window or query - j < window or j - start < sinks}
            assert needed <= set(keys)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("lengths", [[300], [7, 300, 1, 63, 270], [128, 128]], ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(4, 1), (16, 20), (200, 3)])
def test_the_block_mask_for_cuda_sinks_selects_what_the_oracle_sees(lengths, window: int, sinks: int) -> None:
    """FlexAttention without compilation runs forward on CPU: it checks the mask, not the CUDA kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    tokens = sum(lengths)
    q, k, v = projected(tokens, 2, 2, 16).detach().split([2, 2, 2], 1)
    mask = kernels_cuda.block_mask(Packing(lengths), window, sinks, q.device)
    batched = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out = flex_attention(*batched, block_mask=mask).squeeze(0).transpose(0, 1)
    assert_same([out], [oracle(q, k, v, lengths, window=window, sinks=sinks)], 1e-12)
    needed = torch.zeros((-(-tokens // 128),) * 2, dtype=torch.bool)
    visible = mask.mask_mod(None, None, torch.arange(tokens)[:, None], torch.arange(tokens)[None])
    for query, key in visible.nonzero().tolist():
        needed[query // 128, key // 128] = True
    assert torch.equal(mask.to_dense()[0, 0].bool() & needed, needed)


def test_backend_is_chosen_by_device_dtype_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {select_backend("cpu", d) for d in (torch.float64, torch.float32, torch.bfloat16)} == {"exact"}
    assert select_backend("cuda", torch.float32) == select_backend("cuda", torch.float64) == "exact"
    for there, want in ((True, "flash_attn"), (False, "torch_varlen")):
        monkeypatch.setattr(kernels_cuda, "has_flash_attn", lambda there=there: there)
        assert select_backend("cuda", torch.bfloat16) == want
        assert select_backend("cuda:1", torch.float16) == want
        assert select_backend("cuda", torch.bfloat16, sinks=True) == "flex"
    monkeypatch.setattr(kernels_cuda, "has_torch_varlen", lambda: False)
    assert select_backend("cuda", torch.bfloat16) == "exact"


def test_packing_drops_documents_without_tokens() -> None:
    packing = Packing([3, 0, 5, 0])
    assert packing.offsets == (0, 3, 8)
    assert cu_seqlens(packing, torch.device("cpu")).tolist() == [0, 3, 8]
    assert cu_seqlens(packing, torch.device("cpu")) is cu_seqlens(packing, torch.device("cpu"))
    assert (packing.tokens, packing.longest) == (8, 5)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"packing": [3, 4]}, "7 packed tokens"),
        ({"packing": [9, -1]}, "document length = -1"),
        ({"window": 0}, "window = 0"),
        ({"sinks": -1}, "sinks = -1"),
        ({"kv_of_q": (0, 1)}, "kv_of_q"),
        ({"kv_of_q": (0, 1, 2)}, "kv_of_q"),
        ({}, "no multiple"),
    ],
)
def test_impossible_attention_is_one_line(kwargs: dict, text: str) -> None:
    q, k, v = projected(8, 3, 2).split([3, 2, 2], 1)
    with pytest.raises(RaypackError, match=text) as error:
        attention(q, k, v, kwargs.pop("packing", [8]), **kwargs)
    assert "\n" not in str(error.value)
