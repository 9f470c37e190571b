"""The oracles: one rank, one document at a time, dense masks, loops. Slow and plain on purpose; in any dtype, with autograd.

Nothing here shares code with the fast paths: agreement then means something.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least fp32; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    kv_of_q: Sequence[int] | None = None,
) -> Tensor:
    """Causal softmax attention inside each document, [N, hq, D]; arguments as `kernels.attention`."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_of_q is None:
        kv_of_q = [head * kv_heads // heads for head in range(heads)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, first = [], 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
        visible = key <= query
        if window is not None:
            visible &= (query - key < window) | (key < sinks)
        document = []
        for head in range(heads):
            scores = wide(q[rows, head]) @ wide(k[rows, kv_of_q[head]]).T * scale
            weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
            document.append(weights @ wide(v[rows, kv_of_q[head]]))
        out.append(torch.stack(document, 1))
    return torch.cat(out).to(q.dtype)
