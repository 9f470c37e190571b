"""F, full attention, by heads over the parents, spread over nodes (hsap), or with gathered keys and values."""

from __future__ import annotations

from torch import Tensor

from raypack.comm.wire import Wire
from raypack.exchange.gathered.keys import gather_keys, join_rows, split_rows
from raypack.exchange.hsap.attention import hsap_attention
from raypack.kernels.attention import attention
from raypack.layers.frame import Frame
from raypack.layers.full.host_plan import FullPlan, Gathered
from raypack.layers.projections import Projections, attend_by_heads


class FullAttention(Projections):
    """Every token sees all tokens of its document up to itself."""

    def forward(self, x: Tensor, frame: Frame, wire: Wire) -> Tensor:
        """[rows, width] -> [rows, width]."""
        qkv, plan = self.project(x, frame), frame.plans[self.letter]
        assert isinstance(plan, FullPlan)
        if plan.gathered is None:
            return self.out(self._exchanged(qkv, plan, wire).flatten(1))
        return self.out(self._gathered(qkv, plan, plan.gathered, wire).flatten(1))

    def _exchanged(self, qkv: Tensor, plan: FullPlan, wire: Wire) -> Tensor:
        """Attention by heads: [rows, heads of Q, K and V, D] -> [rows, heads, D]."""
        by_heads = plan.by_heads

        def attend(call: Tensor, number: int) -> Tensor:
            description = by_heads.into.calls[number]
            if description.spread:
                assert plan.hsap is not None
                return hsap_attention(call, plan.hsap, wire)
            q0, q1, k0, k1 = description.heads
            q, k, v = call.split([q1 - q0, k1 - k0, k1 - k0], dim=1)
            return attention(q, k, v, by_heads.packings[number], kv_of_q=by_heads.kv_of_q[number], kernel=self.kernel)

        return attend_by_heads(qkv, by_heads, wire, "full", attend)

    def _gathered(self, qkv: Tensor, plan: FullPlan, gathered: Gathered, wire: Wire) -> Tensor:
        """As `_exchanged`, where some rows stay and get the keys and values of their documents instead."""
        c = self.config
        exchanged, *stay = split_rows(gathered.plan, qkv)
        outputs = [self._exchanged(exchanged, plan, wire)]
        blocks = zip(stay, gathered.plan.blocks, gathered.queries, gathered.keys, strict=True)
        for rows, block, queries, keys in blocks:
            q, kv = rows.split([c.heads, 2 * c.kv_heads], dim=1)
            k, v = gather_keys(kv, block, wire).split([c.kv_heads, c.kv_heads], dim=1)
            outputs.append(attention(q, k, v, queries, keys=keys, kernel=self.kernel))
        return join_rows(gathered.plan, outputs)
