"""What softmax layers share: Q, K and V of this rank's tokens, attention by heads between two exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raypack.comm.wire import Wire
from raypack.config import ModelConfig
from raypack.exchange.heads.plan import ByHeads
from raypack.exchange.heads.run import to_heads, to_tokens
from raypack.kernels.attention import Kernel
from raypack.layers.frame import Frame


def normalize_heads(qkv: Tensor, heads: int, kv_heads: int, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm on each query and key head of [N, heads + 2 * kv_heads, D], before RoPE; values as they were."""
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    q = F.rms_norm(q, q_weight.shape, q_weight, eps)
    k = F.rms_norm(k, k_weight.shape, k_weight, eps)
    return torch.cat([q, k, v], 1)


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


class Projections(nn.Module):
    """The parameters of a softmax layer.

    Args:
        config: the model.
        letter: of the layer kind; names its plan in the frame.

    Attributes:
        kernel: computes the attention of what is not spread over nodes; None = the best for device and dtype.
    """

    kernel: Kernel | None = None

    def __init__(self, config: ModelConfig, letter: str) -> None:
        super().__init__()
        self.config, self.letter = config, letter
        h, k, d = config.heads, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.width, (h + 2 * k) * d, bias=False)
        self.out = nn.Linear(h * d, config.width, bias=False)
        self.q_norm = nn.Parameter(torch.ones(d)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(d)) if config.qk_norm else None

    def project(self, x: Tensor, frame: Frame) -> Tensor:
        """[rows, width] -> [rows, heads of Q, K and V, D]; norms and rotation done."""
        c = self.config
        qkv = self.qkv(x).view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv = normalize_heads(qkv, c.heads, c.kv_heads, self.q_norm, self.k_norm, c.norm_eps)
        return rotate(qkv, rope_of(frame, c, x.device, qkv.dtype), c.heads + c.kv_heads)


def attend_by_heads(
    qkv: Tensor, plan: ByHeads, wire: Wire, site: str, attend: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """[rows, heads of Q, K and V, D] -> [rows, heads, D].

    Args:
        site: of the exchanges in the ledger, without `_in` and `_out`.
        attend: [tokens, heads of a call, D] and the call's number -> [tokens, query heads of the call, D].
    """
    calls = to_heads(qkv, plan.into, wire, f"{site}_in")
    if not calls:  # a rank that holds nothing and meets nobody: its parameters still take part
        return qkv[:, : plan.into.heads.heads]
    outputs = [attend(call, number) for number, call in enumerate(calls)]
    return to_tokens(outputs, plan.out, wire, f"{site}_out")
