"""The work of chosen experts on local rows: dispatch, grouped SwiGLU, combine. Deterministic in forward and backward.

torch's gathers have scatter-adds as backward, which run in any order on GPUs; here a token's copies are found again by
the inverse permutation and summed in the order in which they were chosen.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def expert_swiglu(x: Tensor, experts: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum over the chosen experts of gate * SwiGLU.

    Args:
        x: [n, width].
        experts: int64 [n, k], the experts of each row.
        gates: [n, k], at least fp32.
        gate_up: [E, 2 * hidden, width], gate rows first.
        down: [E, width, hidden].
    """
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    counts = expert_counts(experts, gate_up.shape[0])
    rows = _Dispatch.apply(x, order, inverse, experts.shape[1])
    gate, up = grouped_linear(rows, gate_up, counts).chunk(2, -1)
    return _Combine.apply(grouped_linear(F.silu(gate) * up, down, counts), gates, order, inverse)


def expert_counts(experts: Tensor, count: int) -> Tensor:
    """Rows that chose each of `count` experts, int64 [count]: sums of integers, the same in any order."""
    flat = experts.flatten()
    return torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`x[rows of expert e] @ weight[e].T`: x [m, in], sorted by expert; weight [E, out, in]; counts int64 [E], sum m.

    torch's grouped product where it takes these tensors (16-byte rows, no fp64; on GPUs bf16), without a wait for the
    device; else a loop over experts.
    """
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    known = x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and not x.is_cuda)
    if aligned and known and x.shape[0]:
        return _GroupedLinear.apply(x, weight, counts)
    # `split` and `unbind`: their backwards are one cat and one stack, not a full-size gradient per expert.
    parts = zip(x.split(counts.tolist()), weight.unbind(0), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in parts])


class _GroupedLinear(torch.autograd.Function):
    """torch's grouped product with its own backward: some GPUs leave the weight gradient of an expert without rows
    unwritten (pytorch issue 172439), and an expanded output gradient is refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=_ends(counts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad, grad_x, grad_weight = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad, weight, offs=_ends(counts))
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad.T, x, offs=_ends(counts))
            grad_weight.masked_fill_((counts == 0)[:, None, None], 0)
        return grad_x, grad_weight, None


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


class _Dispatch(torch.autograd.Function):
    """Row `order[i] // k` of x [n, width] for each i of n * k; backward: the sum of a row's k copies, at least fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _sum_of_copies(grad, inverse.view(-1, ctx.copies), None).to(grad.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """[n, width] from expert outputs y [n * k, width]: the sum of a row's k copies times their gates, at least fp32."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gates: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(y, gates, order, inverse)
        return _sum_of_copies(y, inverse.view(gates.shape), gates).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, gates, order, inverse = ctx.saved_tensors
        rows = grad[order // gates.shape[1]].to(gates.dtype)
        grad_gates = (rows * y).sum(-1)[inverse].view(gates.shape)
        grad_y = rows.mul_(gates.flatten()[order].unsqueeze(1)).to(y.dtype)
        return grad_y, grad_gates, None, None


def _sum_of_copies(y: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    """Sum over j of `y[places[:, j]] * gates[:, j]`, [n, width], in promote_types(dtype, float32)."""
    wide = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros((places.shape[0], y.shape[1]), dtype=wide, device=y.device)
    for j, place in enumerate(places.unbind(1)):
        part = y[place].to(wide)
        total += part if gates is None else part.mul_(gates[:, j, None])
    return total
