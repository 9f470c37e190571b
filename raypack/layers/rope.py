"""Rotary position embedding on packed projections, by document position (Su et al. 2021).

Pairs are (i, i + D/2), the convention of Llama and Qwen weights, turned by `position * base ** (-2 i / D)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.config import ModelConfig
from raypack.layers.frame import Frame

ROWS = 4096


@dataclass(frozen=True)
class RopeTable:
    """Cosine and sine of every row's angles, [N, 1, D/2], at least fp32. Made once a round, used by every layer."""

    cos: Tensor
    sin: Tensor


def rope_table(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> RopeTable:
    """Angles of `positions`, int64 [N] (index in the document), for a model of `dtype`.

    The angles themselves are fp64: at position 500,000 fp32 would be off by 0.03 radian.
    """
    rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions.to(torch.float64)[:, None, None] * rates
    wide = torch.promote_types(dtype, torch.float32)
    return RopeTable(angles.cos().to(wide), angles.sin().to(wide))


def rope_of(frame: Frame, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> RopeTable:
    """Rotation angles of a rank's rows, from their positions in their documents; made once a round."""

    def make() -> RopeTable:
        positions = torch.from_numpy(frame.segments.positions).to(device, non_blocking=True)
        return rope_table(positions, config.head_dim, config.rope_base, dtype)

    return frame.kept.keep(("rope", device, dtype), make)


def rotate(qkv: Tensor, table: RopeTable, heads: int) -> Tensor:
    """Turn the first `heads` heads of [N, G, D] (queries and keys of a packed projection), copy the rest (values)."""
    return _Rotate.apply(qkv, table.cos, table.sin, heads)


class _Rotate(torch.autograd.Function):
    """One new tensor a pass: a rotation's backward is the rotation back, so no activation is saved."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _turned(qkv, cos, sin, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin, ctx.heads), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[:, heads:] = x[:, heads:]
    # Blocks of rows bound the temporaries, which are wider than the model's dtype.
    for first in range(0, x.shape[0], ROWS):
        rows = slice(first, first + ROWS)
        a, b = x[rows, :heads].to(cos.dtype).chunk(2, -1)
        out_a, out_b = out[rows, :heads].chunk(2, -1)
        out_a.copy_(torch.addcmul(a * cos[rows], b, sin[rows], value=-1))
        out_b.copy_(torch.addcmul(b * cos[rows], a, sin[rows]))
    return out
