"""Compute that is slept instead of done, in autograd's order: for benchmarks of waiting on simulated nodes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.neighbours import Ring


def work_for(x: Tensor, seconds: float) -> Tensor:
    """`x` after `seconds`; its gradient takes twice as long."""
    return _Work.apply(x, seconds)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


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
