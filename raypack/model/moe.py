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
from torch import Tensor, nn

from raypack.errors import RaypackError
from raypack.model.chunked import run_by_rows
from raypack.model.experts import expert_counts, expert_swiglu
from raypack.model.mlp import SwiGLU

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
