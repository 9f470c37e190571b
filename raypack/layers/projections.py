"""What softmax layers share: Q, K and V of this rank's tokens, attention by heads between two exchanges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from raypack.comm.wire import Wire
from raypack.config import ModelConfig
from raypack.exchange.heads.plan import ByHeads
from raypack.exchange.heads.run import to_heads, to_tokens
from raypack.kernels.attention import Kernel
from raypack.layers.frame import Frame
from raypack.layers.norm import normalize_heads
from raypack.layers.rope import rope_of, rotate


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
