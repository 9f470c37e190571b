"""S, sliding-window attention, by heads over the children."""

from __future__ import annotations

from torch import Tensor

from raypack.comm.wire import Wire
from raypack.exchange.heads.plan import ByHeads
from raypack.kernels.attention import attention
from raypack.layers.frame import Frame
from raypack.layers.projections import Projections, attend_by_heads


class WindowAttention(Projections):
    """Every token sees itself, the `window - 1` tokens before it and the first `sinks` tokens of its document."""

    def forward(self, x: Tensor, frame: Frame, wire: Wire) -> Tensor:
        """[rows, width] -> [rows, width]."""
        plan = frame.plans[self.letter]
        assert isinstance(plan, ByHeads)

        def attend(call: Tensor, number: int) -> Tensor:
            description = plan.into.calls[number]
            assert not description.spread, "an S layer got the exchange of full layers"
            q0, q1, k0, k1 = description.heads
            q, k, v = call.split([q1 - q0, k1 - k0, k1 - k0], dim=1)
            return attention(
                q,
                k,
                v,
                plan.packings[number],
                window=self.config.window,
                sinks=self.config.sinks,
                kv_of_q=plan.kv_of_q[number],
                kernel=self.kernel,
            )

        return self.out(attend_by_heads(self.project(x, frame), plan, wire, "sparse", attend).flatten(1))
