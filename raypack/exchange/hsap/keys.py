"""The keys and values of hsap attention on their way, tick by tick, while the rank computes.

At every tick all sends and receives are posted together, as one batch of point-to-point calls on the component's group,
in one order on all ranks. While they are under way the rank attends to what came before. For the step of tick t:

| tick | forward and backward | backward only |
|---|---|---|
| t | its part of K and V crosses nodes | |
| t + 1 | the parts go round among the sharers, if there are any | |
| t + lag | attention over them, `lag` = 2 with sharers, else 1 | |
| t + lag + 1 | | with sharers: each gets the gradients of its part, sums them in rank order |
| then | | the gradients cross nodes, back to the owner, who adds them in the order of ticks |

The backward fetches K and V once more instead of keeping them: a rank holds at most `lag` + 1 steps' rows of others,
whatever the length, and `lag` + 1 steps' gradients. Sums run at least in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from raypack.comm.wire import Wire
from raypack.exchange.hsap.plan import Leg, Routes
from raypack.plan.topology import Block

SITE = "kv_exchange"


def exchange_keys(
    kv: Tensor,
    routes: Routes,
    wire: Wire,
    local: Callable[[], None],
    attend: Callable[[Leg, Tensor], Tensor | None],
    total: Tensor | None = None,
) -> None:
    """Run all ticks.

    Args:
        kv: [local rows, vectors, head_dim], this rank's K heads, then its V heads.
        local: the work that needs no other rank; runs while the first batch is under way.
        attend: gets a leg and its K and V [leg.rows, vectors, head_dim] (lost at its return); with `total` it returns
            their gradient.
        total: backward: [local rows, vectors, head_dim], at least fp32; the gradients of this rank's K and V from other
            nodes are added to it.
    """
    run = _Run(kv, routes, wire, total)
    if not routes.ticks:
        local()
        return
    for tick in range(routes.ticks + run.drain):
        with record_function(f"exchange {SITE}"):
            works = run.post(tick)
        if tick == 0:
            local()
        if (leg := routes.by_tick.get(tick - run.lag)) and leg.rows:
            grads = attend(leg, run.arrived.pop(leg.tick))
            if grads is not None:
                run.gradients[leg.tick] = grads
        if works:
            with wire.waiting(SITE):
                for work in works:
                    work.wait()
        run.settle(tick)


class _Run:
    """One pass over the ticks: what is under way, and the buffers it is in."""

    def __init__(self, kv: Tensor, routes: Routes, wire: Wire, total: Tensor | None) -> None:
        self.kv, self.routes, self.wire, self.total = kv, routes, wire, total
        self.shared = len(routes.sharers) > 1
        self.lag = 2 if self.shared else 1
        self.drain = self.lag if total is None else self.lag + 1 + self.shared + 1
        self.others = [i for i in range(len(routes.sharers)) if i != routes.index]
        self.arrived: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.contributed: dict[int, list[Tensor]] = {}
        self.returned: dict[int, Tensor] = {}
        self.ops: list[dist.P2POp] = []
        self.under_way: list[dist.P2POp] = []

    def post(self, tick: int) -> list[dist.Work]:
        """Begin everything of this tick, in the same order on both ends of every pair of ranks."""
        legs, lag = self.routes.by_tick, self.lag
        if leg := legs.get(tick):
            self._cross(leg)
        if self.shared and (leg := legs.get(tick - 1)):
            self._go_round(leg)
        if self.total is not None:
            if self.shared and (leg := legs.get(tick - lag - 1)):
                self._gather_gradients(leg)
            if leg := legs.get(tick - lag - 1 - self.shared):
                self._return(leg)
        self.under_way, self.ops = self.ops, []  # keeps what is being sent alive
        return dist.batch_isend_irecv(self.under_way) if self.under_way else []

    def settle(self, tick: int) -> None:
        """What follows from a finished tick's gradients: sums, in a fixed order."""
        if self.total is None:
            return
        if self.shared and (leg := self.routes.by_tick.get(tick - self.lag - 1)) and leg.rows:
            first, end = leg.parts[self.routes.index]
            parts = self.contributed.pop(leg.tick)
            parts.insert(self.routes.index, self.gradients[leg.tick][first:end])
            summed = parts[0].to(self.total.dtype)
            for each in parts[1:]:
                summed = summed + each
            self.gradients[leg.tick] = summed
        if (leg := self.routes.by_tick.get(tick - self.lag - 1 - self.shared)) is None:
            return
        self.gradients.pop(leg.tick, None)
        if leg.target is not None:
            at, back = 0, self.returned.pop(leg.tick)
            for a, b in leg.send:
                self.total[a:b] += back[at : at + b - a]
                at += b - a

    def _cross(self, leg: Leg) -> None:
        if leg.target is not None:
            self._send(torch.cat([self.kv[a:b] for a, b in leg.send]), leg.target)
        if leg.rows:
            buffer = self._buffer(f"kv {leg.tick % (self.lag + 1)}", leg.rows)
            self.arrived[leg.tick] = buffer
            if leg.source is not None:
                first, end = leg.parts[self.routes.index]
                self._receive(buffer[first:end], leg.source)

    def _go_round(self, leg: Leg) -> None:
        first, end = leg.parts[self.routes.index]
        for i in self.others:
            low, high = leg.parts[i]
            if end > first:
                self._send(self.arrived[leg.tick][first:end], self.routes.sharers[i])
            if high > low:
                self._receive(self.arrived[leg.tick][low:high], self.routes.sharers[i])

    def _gather_gradients(self, leg: Leg) -> None:
        if not leg.rows:
            return
        first, end = leg.parts[self.routes.index]
        self.contributed[leg.tick] = []
        for i in self.others:
            low, high = leg.parts[i]
            if high > low:
                self._send(self.gradients[leg.tick][low:high].to(self.kv.dtype), self.routes.sharers[i])
            into = self._buffer(f"kv gradients {i}", end - first)
            self.contributed[leg.tick].append(into)
            if end > first:
                self._receive(into, self.routes.sharers[i])

    def _return(self, leg: Leg) -> None:
        if leg.source is not None:
            self._send(self.gradients[leg.tick].to(self.kv.dtype), leg.source)
        if leg.target is not None:
            self.returned[leg.tick] = self._buffer("kv returned", leg.sent)
            self._receive(self.returned[leg.tick], leg.target)

    def _send(self, rows: Tensor, rank: int) -> None:
        rows = rows.contiguous()
        self.ops.append(dist.P2POp(dist.isend, rows, rank, self._group))
        size = self.kv.shape[-1] * self.kv.element_size()
        self.wire.ledger.count_exchange(SITE, Block(rank, 1), [rows.shape[0] * rows.shape[1]], size)

    def _receive(self, rows: Tensor, rank: int) -> None:
        self.ops.append(dist.P2POp(dist.irecv, rows, rank, self._group))

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.wire.groups is not None
        return self.wire.groups[self.routes.block]

    def _buffer(self, use: str, rows: int) -> Tensor:
        buffer = self.wire.scratch(use, rows * self.routes.vectors, self.kv)
        if self.wire.poison:
            buffer.fill_(float("nan"))
        return buffer.view(rows, self.routes.vectors, self.kv.shape[-1])
