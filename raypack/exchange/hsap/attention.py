"""Full attention of the hsap documents around a rank: its node's queries over all keys before them (docs/hsap.md).

The rank holds its share of the heads for the tokens of its node's segments. Local rows attend to local rows at once;
keys and values of other nodes arrive tick by tick, and partial outputs are merged by log-sum-exp at least in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.comm.wire import Wire
from raypack.exchange.hsap.keys import exchange_keys
from raypack.exchange.hsap.plan import HsapPlan, Leg
from raypack.kernels import partial
from raypack.kernels.packing import Span


def hsap_attention(call: Tensor, plan: HsapPlan, wire: Wire, scale: float | None = None) -> Tensor:
    """[rows, Q + K + V heads, D] -> [rows, Q heads, D]; differentiable, part of the graph also where empty.

    Args:
        call: what the exchange delivered for the spread samples, in the order of the plan's rows.
    """
    return _Hsap.apply(call, plan, wire, call.shape[-1] ** -0.5 if scale is None else scale)


class _Hsap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Tensor, plan: HsapPlan, wire: Wire, scale: float) -> Tensor:
        heads = _Split(call, plan)
        wide = torch.promote_types(call.dtype, torch.float32)
        out = torch.zeros(heads.q.shape, dtype=wide, device=call.device)
        lse = torch.full(heads.q.shape[:2], -torch.inf, dtype=wide, device=call.device)

        def local() -> None:
            for span, part in _forward(heads.q, heads.kv, heads, plan.local, scale):
                out[span.query : span.query_end] = part.out
                lse[span.query : span.query_end] = part.lse

        def attend(leg: Leg, kv: Tensor) -> None:
            for span, part in _forward(heads.q, kv, heads, [Span(*work) for work in leg.work], scale):
                rows = slice(span.query, span.query_end)
                partial.merge(out[rows], lse[rows], part)

        exchange_keys(heads.kv, plan.routes, wire, local, attend)
        merged = out.to(call.dtype)
        ctx.save_for_backward(call, merged, lse)
        ctx.plan, ctx.wire, ctx.scale = plan, wire, scale
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        call, out, lse = ctx.saved_tensors
        plan: HsapPlan = ctx.plan
        heads = _Split(call, plan)
        wide = torch.promote_types(call.dtype, torch.float32)
        total = torch.zeros(call.shape, dtype=wide, device=call.device)
        grad_q, grad_kv = total.split([heads.queries, 2 * heads.keys], 1)

        def part(kv: Tensor, spans: Sequence[Span], into: Tensor) -> None:
            """Add the gradients of these spans to `grad_q` and to `into`, that of `kv`."""
            if not spans or not heads.queries:
                return
            k, v = heads.expand(kv)
            grads = torch.zeros((2, *k.shape), dtype=wide, device=k.device)
            partial.backward(grad, heads.q, k, v, out, lse, spans, ctx.scale, grad_q, grads[0], grads[1])
            heads.reduce(grads, into)

        def local() -> None:
            part(heads.kv, plan.local, grad_kv)

        def attend(leg: Leg, kv: Tensor) -> Tensor:
            into = torch.zeros(kv.shape, dtype=wide, device=kv.device)
            part(kv, [Span(*work) for work in leg.work], into)
            return into

        exchange_keys(heads.kv, plan.routes, ctx.wire, local, attend, grad_kv)
        return total.to(call.dtype), None, None, None


class _Split:
    """Views of a call by kind, and the KV heads as the kernels want them: equally many query heads each, in order."""

    def __init__(self, call: Tensor, plan: HsapPlan) -> None:
        self.kv_of_q = plan.kv_of_q
        self.queries = len(plan.kv_of_q)
        self.keys = plan.routes.vectors // 2
        self.q, self.kv = call.split([self.queries, 2 * self.keys], 1)
        share, rest = divmod(self.queries, max(self.keys, 1))
        self.plain = not rest and all(j == i // share for i, j in enumerate(self.kv_of_q))

    def expand(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        k, v = kv.split([self.keys, self.keys], 1)
        if self.plain:
            return k, v
        return k[:, list(self.kv_of_q)], v[:, list(self.kv_of_q)]

    def reduce(self, grads: Tensor, into: Tensor) -> None:
        """Adjoint of `expand`, added to `into` [rows, K and V heads, D]: copies summed in the order of query heads."""
        if self.plain:
            into += torch.cat([grads[0], grads[1]], 1)
            return
        for i, j in enumerate(self.kv_of_q):
            into[:, j] += grads[0, :, i]
            into[:, self.keys + j] += grads[1, :, i]


def _forward(
    q: Tensor, kv: Tensor, heads: _Split, spans: Sequence[Span], scale: float
) -> list[tuple[Span, partial.Partial]]:
    if not spans or not heads.queries:
        return []
    k, v = heads.expand(kv)
    return list(zip(spans, partial.forward(q, k, v, spans, scale), strict=True))
