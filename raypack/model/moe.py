"""Mixture of experts on local rows: token choice, top-k, balanced without an auxiliary loss.

Scores are sigmoids of the router's logits. Experts are chosen by score + bias, and weighed by the score alone,
normalised over the chosen (DeepSeek-V3, section 2.1.2). The bias moves once per applied step, from counts over all
ranks, so it does not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raypack.errors import RaypackError
from raypack.model.mlp import SwiGLU, run_by_rows


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


TINY = 1e-20


@dataclass(frozen=True)
class Routing:
    """What a router decided: `experts`, int64 [n, k], the choice of each row, best first; `counts`, int64 [E], the
    local rows of each expert. Given back to `MoE.forward`, it replays the choice."""

    experts: Tensor
    counts: Tensor


def choose(scores: Tensor, bias: Tensor, active: int) -> Tensor:
    """The `active` experts of highest score + bias, int64 [n, active], best first; ties to the lowest id.

    A stable sort: `torch.topk` breaks ties arbitrarily, and a tie must not depend on the plan.
    """
    return torch.sort(scores.detach() + bias, dim=-1, descending=True, stable=True).indices[:, :active]


class MoE(nn.Module):
    """`experts_active` of `experts` SwiGLU blocks of hidden size `expert_width` for each row, plus a shared one.

    Parameters: `router.weight` [E, width]; `gate_up` [E, 2 * expert_width, width], gate rows first; `down`
    [E, width, expert_width]; `shared.gate_up.weight` and `shared.down.weight` where `shared_expert_width` > 0.
    Buffer: `bias` [E], at least fp32 in a model of any dtype.
    """

    bias: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        experts_active: int,
        expert_width: int,
        shared_expert_width: int = 0,
        chunk_tokens: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= experts_active <= experts:
            raise RaypackError(f"experts_active = {experts_active}: must lie in 1..{experts} (experts)")
        self.experts_active, self.chunk_tokens = experts_active, chunk_tokens
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * expert_width, width))
        self.down = nn.Parameter(torch.empty(experts, width, expert_width))
        self.shared = SwiGLU(width, shared_expert_width, chunk_tokens) if shared_expert_width else None
        self.register_buffer("bias", torch.zeros(experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.Linear`: uniform within 1 / sqrt(inputs)."""
        for weight in (self.gate_up, self.down):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`model.to(bfloat16)` must not take the bias along: its steps would be lost in 8 bits."""
        before = self.bias
        super()._apply(fn, recurse)
        source = self.bias if before.is_meta else before
        self.bias = source.to(self.bias.device, torch.promote_types(self.bias.dtype, torch.float32))
        return self

    def forward(self, x: Tensor, routing: Routing | None = None) -> tuple[Tensor, Routing]:
        """Rows [n, width] (n may be 0: every parameter then gets a zero gradient) and how they were routed.

        `routing`: replay this choice; gates and their gradients still come from the router.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = torch.sigmoid(x.to(wide) @ self.router.weight.to(wide).T)
        if routing is None:
            experts = choose(scores, self.bias, self.experts_active)
            routing = Routing(experts, expert_counts(experts, scores.shape[1]))
        chosen = scores.gather(1, routing.experts)
        gates = chosen / (chosen.sum(-1, keepdim=True) + TINY)
        y = run_by_rows(expert_swiglu, self.chunk_tokens, (x, routing.experts, gates), (self.gate_up, self.down))
        return (y if self.shared is None else y + self.shared(x)), routing

    @torch.no_grad()
    def update_bias(self, global_counts: Tensor, rate: float) -> None:
        """Move the bias towards balance, by at most `rate`: bias += rate * clamp((mean - count) / mean, -1, 1).

        Args:
            global_counts: [E], rows of each expert in the whole step, summed over all ranks and rounds.
            rate: largest move.
        """
        counts = global_counts.to(self.bias.dtype)
        mean = counts.mean()
        self.bias += rate * ((mean - counts) / mean.clamp(min=1e-12)).clamp(-1, 1)
