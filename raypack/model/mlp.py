"""The dense feed-forward block: SwiGLU (Shazeer 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from raypack.model.chunked import run_by_rows


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
