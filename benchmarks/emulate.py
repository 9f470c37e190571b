"""Compute that is slept instead of done, in autograd's order: for benchmarks of waiting on simulated nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.baselines.neighbours import Passing, Ring
from raypack.comm.collect import all_gather


def work_for(x: Tensor, seconds: float, least: float = 0.0) -> Tensor:
    """`x` after `seconds`; its gradient takes twice as long. Both take at least `least`: a latency that they hide."""
    return _Work.apply(x, seconds, least)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, least: float) -> Tensor:
        ctx.seconds = max(2 * seconds, least)
        time.sleep(max(seconds, least))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


def gathered(x: Tensor, size: int, group: dist.ProcessGroup, latency: float) -> Tensor:
    """`x` after an all-gather of `size` bf16 numbers of each rank; its gradient after the sums' way back."""
    world = dist.get_world_size(group)
    back = partial(_swap, size * world, group)  # each rank's keys' gradients to their owner
    return _Moved.apply(x, partial(_gather, size, group), back, latency)


def swapped(x: Tensor, size: int, group: dist.ProcessGroup, latency: float) -> Tensor:
    """`x` after an all-to-all in which each rank sends `size` bf16 numbers, evenly; its gradient after another."""
    move = partial(_swap, size, group)
    return _Moved.apply(x, move, move, latency)


class _Moved(torch.autograd.Function):
    """`there()` in forward and `back()` in backward, each with a latency."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[], None], back: Callable[[], None], latency: float) -> Tensor:
        ctx.back, ctx.latency = back, latency
        there()
        time.sleep(latency)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.back()
        time.sleep(ctx.latency)
        return grad, None, None, None


def _gather(size: int, group: dist.ProcessGroup) -> None:
    parts = torch.empty(size * dist.get_world_size(group), dtype=torch.bfloat16)
    all_gather(parts, torch.zeros(size, dtype=torch.bfloat16), group=group)


def _swap(size: int, group: dist.ProcessGroup) -> None:
    world = dist.get_world_size(group)
    sent = torch.zeros(size // world * world, dtype=torch.bfloat16)
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


@dataclass
class SlowRing(Ring):
    """A ring whose messages arrive `latency(source rank)` seconds later than they would."""

    latency: Callable[[int], float] = lambda _: 0.0

    def receive(self, like: Tensor, source: int) -> Tensor:
        out = super().receive(like, source)
        time.sleep(self.latency(source))
        return out

    def pass_on(self, x: Tensor, *, chained: bool = True) -> Passing:
        moving = super().pass_on(x, chained=chained)
        return _SlowPassing(moving.out, moving.sent, moving.works, self.latency((self.rank - 1) % self.width))


@dataclass
class _SlowPassing(Passing):
    seconds: float = 0.0

    def wait(self) -> Tensor:
        out = super().wait()
        time.sleep(self.seconds)
        return out


class RingOfKeys(torch.autograd.Function):
    """The messages of `baselines.linear_ring` for a shard's keys and values, and `seconds` of work on every one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, seconds: float, ring: Ring) -> Tensor:
        ctx.keys, ctx.seconds, ctx.ring = keys, seconds, ring
        for step in range(1, ring.width):
            keys = ring.pass_on(keys).wait()
            if ring.rank >= step:
                time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ring: Ring = ctx.ring
        moving = torch.stack([ctx.keys, torch.zeros_like(ctx.keys)])
        for step in range(1, ring.width):
            moving = ring.pass_on(moving).wait()
            if ring.rank >= step:
                time.sleep(2 * ctx.seconds)
        ring.pass_on(moving[1]).wait()
        return grad, None, None, None
