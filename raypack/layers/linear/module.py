"""Linear attention (L): LASP-2 over the child layout of a round (Sun et al. 2025; docs/linear.md).

Tokens stay where they are; states of documents that cross shard borders move, one all-gather a direction. What a rank
computes inside its own shards runs while that gather is in flight.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypack.comm.wire import Wire
from raypack.config import ModelConfig
from raypack.exchange.lasp2.gather import finish, piece_of_row, start
from raypack.exchange.lasp2.states import StatePlan
from raypack.layers.frame import Frame
from raypack.layers.linear.chunk import entered, inside, state_of
from raypack.layers.linear.conv import short_conv
from raypack.layers.linear.host_plan import LinearPlan

GATE_TEMPER = 16.0
"""Gates are sigmoid(x) ** (1 / 16), so that they forget slowly at first (Yang et al. 2024, section 4.4)."""


def head_decay(kv_heads: int) -> list[float]:
    """Log decay of a token for each KV head: of 1 - 1/32 ... 1 - 1/512, evenly spaced in the log (Sun et al. 2023)."""
    step = math.log(16) / max(1, kv_heads - 1)
    return [math.log1p(-math.exp(-math.log(32) - i * step)) for i in range(kv_heads)]


class LinearAttention(nn.Module):
    """Q, K and V of this rank's tokens -> short convolution -> feature map -> linear attention -> norm -> projection.

    Query heads share the states of their KV head. No rotary embedding: decay and convolution know the order.
    """

    def __init__(self, config: ModelConfig, letter: str = "L") -> None:
        super().__init__()
        self.config, self.letter = config, letter
        h, k, d = config.heads, config.kv_heads, config.head_dim
        channels = (h + 2 * k) * d
        self.qkv = nn.Linear(config.width, channels, bias=False)
        self.out = nn.Linear(h * d, config.width, bias=False)
        self.conv = nn.Parameter(torch.zeros(channels, config.linear_conv)) if config.linear_conv else None
        self.out_norm = nn.Parameter(torch.ones(d)) if config.linear_norm else None
        gated = config.linear_decay == "gate"
        self.gate_in = nn.Linear(config.width, config.linear_gate_rank, bias=False) if gated else None
        self.gate_out = nn.Linear(config.linear_gate_rank, k * d, bias=True) if gated else None

    def forward(self, x: Tensor, frame: Frame, wire: Wire) -> Tensor:
        """[rows, width] -> [rows, width]."""
        c = self.config
        plan = frame.plans[self.letter]
        assert isinstance(plan, LinearPlan)
        qkv = self.qkv(x)
        if self.conv is not None:
            assert plan.halo is not None
            qkv = short_conv(qkv, self.conv, plan.halo, wire)
        wide = torch.promote_types(x.dtype, torch.float32)
        qkv = qkv.to(wide).view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 1)
        q, k = _feature(q, c.linear_feature) * c.head_dim**-0.5, _feature(k, c.linear_feature)
        grouped = q.unflatten(1, (c.kv_heads, c.heads // c.kv_heads))
        y = linear_attention(grouped, k, v, self.log_decay(x, wide), plan.states, wire, c.linear_chunk).flatten(1, 2)
        y = y.to(x.dtype)
        if self.out_norm is not None:
            y = F.rms_norm(y, self.out_norm.shape, self.out_norm, c.norm_eps)
        return self.out(y.flatten(1))

    def log_decay(self, x: Tensor, wide: torch.dtype) -> Tensor | None:
        """None, [KV heads], or [rows, KV heads, D]."""
        if self.gate_in is not None and self.gate_out is not None:
            gate = self.gate_out(self.gate_in(x)).to(wide)
            return (F.logsigmoid(gate) / GATE_TEMPER).view(len(x), self.config.kv_heads, self.config.head_dim)
        if self.config.linear_decay == "head":
            return torch.tensor(head_decay(self.config.kv_heads), dtype=wide, device=x.device)
        return None


def _feature(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return F.relu(x)
    if name == "elu":
        return F.elu(x) + 1
    return F.silu(x) if name == "silu" else x


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, plan: StatePlan, wire: Wire, chunk: int
) -> Tensor:
    """Linear attention of this rank's rows, over all ranks that hold parts of their documents.

    Args:
        q, k, v, g: as in `linear_chunk`.
        plan: who holds what.
        chunk: rows of a chunk, a power of two.

    Returns:
        [rows, K, G, D].
    """
    piece = piece_of_row(plan, q.device)
    if not plan.widths:
        return inside(q, k, v, g, piece, chunk)
    sizes = list(plan.sections)
    keys, values, queries = k.split(sizes), v.split(sizes), q.split(sizes)
    gates = g if g is not None and g.dim() > 1 else None
    decays = [g] * len(sizes) if gates is None else list(gates.split(sizes))
    # A slot without a state of this rank takes part with no rows: zeros that are tied to the graph.
    nothing = (k[:0], v[:0], g if gates is None else gates[:0])
    parts = [nothing] * len(plan.widths)
    for link in plan.links:
        if link.leaving is not None:
            at = link.leaving.section
            parts[link.slot] = (keys[at], values[at], decays[at])
    states = torch.stack([state_of(*part) for part in parts])
    totals = None if gates is None else torch.stack([part[2].sum(0) for part in parts if part[2] is not None])
    flight, ticket = start(states, totals, g if gates is None else None, plan, wire)
    out = inside(q, k, v, g, piece, chunk)
    incoming = finish(ticket, flight)
    outs = list(out.split(sizes))
    for link in plan.links:
        if link.entering is not None:
            at = link.entering.section
            outs[at] = outs[at] + entered(queries[at], decays[at], incoming[link.slot])
    # The sum over no slots ties the gather's backward to every rank, whether a state entered or not.
    return torch.cat([*outs, out[:0]]) + incoming[:0].sum()
