"""`state_gather`: the one all-gather of a linear layer and direction, and the sums around it.

Forward: a rank gives the state of what it holds of the document that leaves each of its shards; it gets the state that
enters each of them, a prefix over the ranks before it. Backward: gradients of entering states are gathered, and a rank
sums those of the ranks after it, a suffix. Buffers are [slots, ...]: they do not depend on the number of tokens.

`start` and `finish` are the two halves of one call; what is computed in between overlaps with the gather. The backward
of `finish` starts its gather, that of `start` waits for it, and autograd runs what was made in between in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from raypack.comm.collect import Gather, start_gather
from raypack.comm.wire import Wire
from raypack.exchange.lasp2.states import Border, StatePlan

OP = "state_gather"


@dataclass
class Flight:
    """A call between its halves. `gather` is the one in flight; the other fields are what `start` leaves for `finish`
    and, in the backward, `finish` for `start`.

    Attributes:
        decay: log of the decay of one token, [KV heads], where it is the same for all tokens.
        gated: whether decays come from the data and travel with the states.
        total: own log decays, and `entered` the states that entered: what the gradient of decays needs.
        logs: log decays of every rank, [width, slots, KV heads, D].
    """

    plan: StatePlan
    wire: Wire
    decay: Tensor | None
    gated: bool
    gather: Gather | None = None
    total: Tensor | None = None
    entered: Tensor | None = None
    logs: Tensor | None = None

    def weights(self, border: Border, slot: int, *, before: bool) -> Tensor | None:
        """Factor of each of the border's ranks, [ranks, KV heads, D or 1]: the decay of the rows between it and here.

        `before`: its ranks are those before this one. None = no decay.
        """
        first, end = border.ranks
        if self.logs is not None:
            logs = self.logs[first:end, slot]
        elif self.decay is not None:
            rows = rows_beside(self.plan, border, self.decay.device)
            logs = (rows[:, None] * self.decay)[:, :, None]
        else:
            return None
        between = torch.zeros_like(logs)
        if before:
            between[:-1] = logs[1:].flip(0).cumsum(0).flip(0)
        else:
            between[1:] = logs[:-1].cumsum(0)
        return between.exp()

    def combine(self, parts: Tensor, *, before: bool) -> Tensor:
        """Prefix (`before`) or suffix of the ranks' states [width, slots, KV heads, D, D], for this rank's slots."""
        out = torch.zeros_like(parts[0])
        for link in self.plan.links:
            border = link.entering if before else link.leaving
            if border is None:
                continue
            weights = self.weights(border, link.slot, before=before)
            for i, rank in enumerate(range(*border.ranks)):
                part = parts[rank, link.slot]
                out[link.slot] += part if weights is None else part * weights[i, :, :, None]
        return out


def start(
    states: Tensor, totals: Tensor | None, decay: Tensor | None, plan: StatePlan, wire: Wire
) -> tuple[Flight, Tensor]:
    """Begin to move states.

    Args:
        states: [slots, KV heads, D, D], what this rank's rows add to the state of the document that leaves each slot's
            shard; zeros where none does. At least fp32.
        totals: [slots, KV heads, D], log decay over these rows, of data-dependent decays; else None.
        decay: [KV heads], log decay of a token, of constant decays; else None.

    Returns:
        The flight, and the ticket (0-dim) that ties the two halves together in autograd.
    """
    flight = Flight(plan, wire, decay, gated=totals is not None)
    return flight, _Start.apply(states, totals, flight)


def finish(ticket: Tensor, flight: Flight) -> Tensor:
    """The states that enter this rank's shards, [slots, KV heads, D, D]; zeros where none does."""
    return _Finish.apply(ticket, flight)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, totals: Tensor | None, flight: Flight) -> Tensor:
        ctx.flight = flight
        sent = states if totals is None else torch.cat([states, totals.unsqueeze(-1)], -1)
        flight.total = totals
        with record_function("state_gather start"):
            flight.gather = start_gather(sent, flight.plan.block, flight.wire, OP)
        return states.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor | None, None]:
        flight: Flight = ctx.flight
        gather, flight.gather = flight.gather, None
        assert gather is not None
        with record_function("state_gather wait"):
            parts = gather.wait()
        leaving = flight.combine(parts, before=False)
        if not flight.gated:
            return leaving, None, None
        assert flight.entered is not None
        assert flight.total is not None
        grad = torch.zeros_like(flight.total)
        for link in flight.plan.links:
            if link.passes:
                through = (flight.entered[link.slot] * leaving[link.slot]).sum(-1)
                grad[link.slot] = flight.total[link.slot].exp() * through
        return leaving, grad, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: Flight) -> Tensor:
        gather, flight.gather = flight.gather, None
        assert gather is not None
        with record_function("state_gather wait"):
            parts = gather.wait()
        if flight.gated:
            flight.logs = parts[..., -1]
            parts = parts[..., :-1]
        entering = flight.combine(parts, before=True)
        ctx.flight = flight
        ctx.save_for_backward(*([entering, flight.total, flight.logs] if flight.gated else []))
        flight.logs = flight.total = None
        return entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        flight: Flight = ctx.flight
        if flight.gated:
            flight.entered, flight.total, flight.logs = ctx.saved_tensors
        with record_function("state_gather start"):
            flight.gather = start_gather(grad, flight.plan.block, flight.wire, OP)
        return grad.new_zeros(()), None


def piece_of_row(plan: StatePlan, device: torch.device) -> Tensor:
    """int64 [rows]: index of the piece of every row; made once a round and device."""
    pieces = plan.pieces
    return plan.kept.keep(
        ("pieces", device), lambda: _on(device, np.repeat(np.arange(len(pieces), dtype=np.int64), pieces))
    )


def rows_beside(plan: StatePlan, border: Border, device: torch.device) -> Tensor:
    """int64 [ranks]: `border.rows`; made once a round and device."""
    return plan.kept.keep((border, device), lambda: _on(device, np.array(border.rows, dtype=np.int64)))


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
