"""The dense feed-forward block: SwiGLU (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

RowFunction = Callable[..., Tensor]


def run_by_rows(
    function: RowFunction, chunk_tokens: int, rows: tuple[Tensor, ...], weights: tuple[Tensor, ...]
) -> Tensor:
    """`function(*rows, *weights)`, computed for `chunk_tokens` rows at a time.

    Args:
        function: maps tensors whose first dimension are rows (and the weights) to one tensor of as many rows; each
            output row depends on the same row of each input only. No randomness: the backward calls it again.
        chunk_tokens: rows alive at once, in forward and backward; 0, or no fewer than there are: one plain call that
            saves its intermediates.
        rows: tensors of n rows; floating ones get gradients.
        weights: shared by all rows. Their gradients are summed over chunks in promote_types(dtype, float32).
    """
    if chunk_tokens <= 0 or rows[0].shape[0] <= chunk_tokens:
        return function(*rows, *weights)
    return _ByRows.apply(function, chunk_tokens, len(rows), *rows, *weights)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: RowFunction, chunk_tokens: int, count: int, *tensors: Tensor) -> Tensor:
        ctx.function, ctx.chunk_tokens, ctx.count = function, chunk_tokens, count
        ctx.save_for_backward(*tensors)
        weights = tensors[count:]
        chunks = zip(*(x.split(chunk_tokens) for x in tensors[:count]), strict=True)
        return torch.cat([function(*chunk, *weights) for chunk in chunks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        rows = saved[: ctx.count]
        weights = [w.detach().requires_grad_(n) for w, n in zip(saved[ctx.count :], needed[ctx.count :], strict=True)]
        row_grads = [torch.empty_like(x) if n else None for x, n in zip(rows, needed, strict=False)]
        sums = [
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) if w.requires_grad else None
            for w in weights
        ]
        for first in range(0, grad.shape[0], ctx.chunk_tokens):
            part = slice(first, first + ctx.chunk_tokens)
            chunk = [x[part].detach().requires_grad_(n) for x, n in zip(rows, needed, strict=False)]
            leaves = [x for x in (*chunk, *weights) if x.requires_grad]
            with torch.enable_grad():
                out = ctx.function(*chunk, *weights)
            grads = iter(torch.autograd.grad(out, leaves, grad[part]))
            for total in row_grads:
                if total is not None:
                    total[part] = next(grads)
            for total in sums:
                if total is not None:
                    total.add_(next(grads))
        weight_grads = [None if s is None else s.to(w.dtype) for s, w in zip(sums, weights, strict=True)]
        return None, None, None, *row_grads, *weight_grads


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`down(silu(gate(x)) * up(x))`.

    x [n, width], gate_up [2 * hidden, width] (gate rows first), down [width, hidden].
    """
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


class SwiGLU(nn.Module):
    """`swiglu` with its weights, `gate_up.weight` and `down.weight`.

    `chunk_tokens` rows at a time where above 0: then hidden values are recomputed in the backward, not saved.
    """

    def __init__(self, width: int, hidden: int, chunk_tokens: int = 0) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.chunk_tokens = chunk_tokens

    def forward(self, x: Tensor) -> Tensor:
        return run_by_rows(swiglu, self.chunk_tokens, (x,), (self.gate_up.weight, self.down.weight))
