"""Attention over a part of the keys: output and log-sum-exp, and the gradients of that part given the whole's.

Parts of one softmax are merged by their log-sum-exps. The backward needs no merging: with the log-sum-exp and the
output of the *whole* row, flash attention's backward gives the exact gradients of any part (Dao et al. 2022,
section 3.1: P = exp(S - lse), dS = P (dP - rowsum(dO O))).

CPU: torch's own flash kernel, one call a span. CUDA: torch's flash varlen kernel, one call for all spans (bf16, fp16).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypack.errors import RaypackError
from raypack.kernels.packing import Span


class Partial(NamedTuple):
    """Output [rows, heads, D] and log-sum-exp [rows, heads] of one span's queries."""

    out: Tensor
    lse: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> list[Partial]:
    """One `Partial` a span.

    Args:
        q: [queries, hq, D]; k, v: [keys, hkv, D] with hkv dividing hq; last dimensions contiguous, else any strides.
        spans: none empty; all causal or none.
    """
    if _on_cpu(q):
        return [_cpu_forward(q, k, v, span, scale) for span in spans]
    return _cuda_forward(q, k, v, spans, scale)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Sequence[Span],
    scale: float,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    """Add the gradients of the spans' part to `grad_q`, `grad_k` and `grad_v` (at least fp32), in the order of spans.

    Args:
        grad, out, lse: of the whole rows: [queries, hq, D], [queries, hq, D], [queries, hq].
    """
    if _on_cpu(q):
        for span in spans:
            _cpu_backward(grad, q, k, v, out, lse, span, scale, grad_q, grad_k, grad_v)
    else:
        _cuda_backward(grad, q, k, v, out, lse, spans, scale, grad_q, grad_k, grad_v)


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def merge(out: Tensor, lse: Tensor, part: Partial) -> None:
    """Merge a further part of the keys into running rows `out` [rows, heads, D] and `lse` (at least fp32), in place."""
    total = torch.logaddexp(lse, part.lse.to(lse.dtype))
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.out.to(out.dtype), (part.lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[rows, hq, D] as [kv heads, query heads of each, rows, D], a view."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _keys(x: Tensor, queries: int) -> Tensor:
    """[rows, hkv, D] as [kv heads, query heads of each, rows, D], a view: each KV head stands for all its queries."""
    return x.permute(1, 0, 2).unsqueeze(1).expand(-1, queries, -1, -1)


def _cpu_parts(q: Tensor, k: Tensor, v: Tensor, span: Span) -> tuple[Tensor, Tensor, Tensor]:
    keys = slice(span.key, span.key_end)
    ratio = q.shape[1] // k.shape[1]
    return _grouped(q[span.query : span.query_end], k.shape[1]), _keys(k[keys], ratio), _keys(v[keys], ratio)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float) -> Partial:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*_cpu_parts(q, k, v, span), 0.0, span.causal, scale=scale)
    return Partial(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    span: Span,
    scale: float,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    queries, keys = slice(span.query, span.query_end), slice(span.key, span.key_end)
    whole = (_grouped(x[queries], k.shape[1]) for x in (grad, out))
    sums = lse[queries].unflatten(1, (k.shape[1], -1)).permute(1, 2, 0).contiguous()
    grad_part, out_part = whole
    grads = flash(grad_part, *_cpu_parts(q, k, v, span), out_part, sums, 0.0, span.causal, scale=scale)
    grad_q[queries] += grads[0].permute(2, 0, 1, 3).flatten(1, 2)
    for total, each in ((grad_k, grads[1]), (grad_v, grads[2])):
        total[keys] += each.sum(1, dtype=total.dtype).permute(1, 0, 2)


def _varlen(
    spans: Sequence[Span], device: torch.device
) -> tuple[list[slice], list[slice], Tensor, Tensor, int, int, bool]:
    """Row ranges, cumulative lengths and longest lengths of queries and keys, and whether the spans are causal."""
    if len({span.causal for span in spans}) > 1:
        raise AssertionError("spans of one call are all causal or none")
    queries = [slice(span.query, span.query_end) for span in spans]
    keys = [slice(span.key, span.key_end) for span in spans]
    sizes = [[s.stop - s.start for s in rows] for rows in (queries, keys)]
    offsets = [
        torch.tensor([0, *size], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
        for size in sizes
    ]
    return queries, keys, offsets[0], offsets[1], max(sizes[0]), max(sizes[1]), spans[0].causal


def _rows(x: Tensor, ranges: list[slice]) -> Tensor:
    return x[ranges[0]] if len(ranges) == 1 else torch.cat([x[rows] for rows in ranges])


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> list[Partial]:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RaypackError(f"hsap on {q.device.type} with {q.dtype}: its kernel takes bfloat16; set train.dtype to it")
    queries, keys, cu_q, cu_k, max_q, max_k, causal = _varlen(spans, q.device)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _rows(q, queries), _rows(k, keys), _rows(v, keys), cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
    )
    sizes = [rows.stop - rows.start for rows in queries]
    return [Partial(a, b) for a, b in zip(out.split(sizes), lse.transpose(0, 1).split(sizes), strict=True)]


def _cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Sequence[Span],
    scale: float,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    queries, keys, cu_q, cu_k, max_q, max_k, causal = _varlen(spans, q.device)
    # Without dropout the random state is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        _rows(grad, queries),
        _rows(q, queries),
        _rows(k, keys),
        _rows(v, keys),
        _rows(out, queries),
        _rows(lse, queries).transpose(0, 1).contiguous(),
        cu_q,
        cu_k,
        max_q,
        max_k,
        0.0,
        causal,
        state,
        state,
        scale=scale,
    )
    for total, rows, each in ((grad_q, queries, grads[0]), (grad_k, keys, grads[1]), (grad_v, keys, grads[2])):
        for where, piece in zip(rows, each.split([r.stop - r.start for r in rows]), strict=True):
            total[where] += piece
