"""Full (F) and sliding-window (S) attention over the head layout of a round."""

from __future__ import annotations

import torch
from torch import nn

from raypack.comm.wire import Wire
from raypack.config import ModelConfig
from raypack.exchange.gathered.keys import gather_keys
from raypack.exchange.heads.run import to_heads, to_tokens
from raypack.exchange.hsap.attention import hsap_attention
from raypack.kernels.attention import attention
from raypack.layers.frame import Attend, Frame, Gathered
from raypack.layers.norm import normalize_heads
from raypack.layers.rope import rotate


class Attention(nn.Module):
    """Q, K and V of this rank's tokens -> exchange -> attention by heads -> exchange -> output projection.

    Args:
        config: the model.
        kind: F (the samples' parents, no window) or S (their children, sliding window and sinks).
    """

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.config, self.kind = config, kind
        self.site = {"F": "full", "S": "sparse"}[kind]
        h, k, d = config.heads, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.width, (h + 2 * k) * d, bias=False)
        self.out = nn.Linear(h * d, config.width, bias=False)
        self.q_norm = nn.Parameter(torch.ones(d)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(d)) if config.qk_norm else None

    def forward(self, x: torch.Tensor, frame: Frame, wire: Wire) -> torch.Tensor:
        """[rows, width] -> [rows, width]."""
        c = self.config
        qkv = self.qkv(x).view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv = normalize_heads(qkv, c.heads, c.kv_heads, self.q_norm, self.k_norm, c.norm_eps)
        qkv = rotate(qkv, frame.rope(c, x.device, qkv.dtype), c.heads + c.kv_heads)
        if self.kind == "F" and frame.gathered is not None:
            return self.out(self._gathered(qkv, frame, frame.gathered, wire).flatten(1))
        attend = frame.full if self.kind == "F" else frame.sparse
        assert attend is not None
        return self.out(self._exchanged(qkv, attend, wire).flatten(1))

    def _exchanged(self, qkv: torch.Tensor, attend: Attend, wire: Wire) -> torch.Tensor:
        """Attention by heads: [rows, heads of Q, K and V, D] -> [rows, heads, D]."""
        c = self.config
        calls = to_heads(qkv, attend.into, wire, f"{self.site}_in")
        if not calls:  # a rank that holds nothing and meets nobody: its parameters still take part
            return qkv[:, : c.heads]
        outputs = []
        for call, description, packing, kv_of_q in zip(
            calls, attend.into.calls, attend.packings, attend.kv_of_q, strict=True
        ):
            if description.spread:
                assert self.kind == "F", "an S layer got the exchange of full layers"
                assert attend.hsap is not None
                outputs.append(hsap_attention(call, attend.hsap, wire))
                continue
            q0, q1, k0, k1 = description.heads
            q, k, v = call.split([q1 - q0, k1 - k0, k1 - k0], dim=1)
            window = c.window if self.kind == "S" else None
            sinks = c.sinks if self.kind == "S" else 0
            outputs.append(attention(q, k, v, packing, window=window, sinks=sinks, kv_of_q=kv_of_q))
        return to_tokens(outputs, attend.out, wire, f"{self.site}_out")

    def _gathered(self, qkv: torch.Tensor, frame: Frame, gathered: Gathered, wire: Wire) -> torch.Tensor:
        """As `_exchanged`, where some rows stay and get the keys and values of their documents instead."""
        c = self.config
        exchanged, *stay = gathered.plan.split(qkv)
        outputs = [self._exchanged(exchanged, frame.full, wire)]
        blocks = zip(stay, gathered.plan.blocks, gathered.queries, gathered.keys, strict=True)
        for rows, block, queries, keys in blocks:
            q, kv = rows.split([c.heads, 2 * c.kv_heads], dim=1)
            k, v = gather_keys(kv, block, wire).split([c.kv_heads, c.kv_heads], dim=1)
            outputs.append(attention(q, k, v, queries, keys=keys))
        return gathered.plan.join(outputs)
