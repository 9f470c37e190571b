"""Short causal convolution of each channel inside documents, before linear attention (Gu and Dao 2023, section 3.4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.comm.wire import Wire
from raypack.exchange.halo.plan import HaloPlan
from raypack.exchange.halo.rows import halo_rows, on_device


def short_conv(x: Tensor, weight: Tensor, plan: HaloPlan, wire: Wire) -> Tensor:
    """`y_t = sum_w weight[:, taps - 1 - w] * x_{t - w}` over the tokens of t's document.

    Args:
        x: [rows, C], this rank's rows.
        weight: [C, taps]; the last tap is that of the token itself.
        plan: of the same number of taps; brings in rows of other ranks.

    Returns:
        [rows, C]; sums are made in promote_types(x.dtype, float32).
    """
    return _Conv.apply(x, halo_rows(x, plan, wire), weight, plan)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Tensor, weight: Tensor, plan: HaloPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, halo, weight)
        whole, taps = _insert(x, halo, plan), _taps(weight)
        out = whole * taps[0]
        for w in range(1, min(len(taps), len(whole))):
            out[w:].addcmul_(whole[:-w] * _inside(plan, whole, w), taps[w])
        return _remove(out, plan)[0].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, halo, weight = ctx.saved_tensors
        plan: HaloPlan = ctx.plan
        whole, taps = _insert(x, halo, plan), _taps(weight)
        grad = _insert(grad, torch.zeros_like(halo), plan)
        out = grad * taps[0]
        grad_taps = torch.zeros_like(taps)
        grad_taps[0] = (grad * whole).sum(0)
        for w in range(1, min(len(taps), len(whole))):
            later = grad[w:] * _inside(plan, whole, w)
            out[:-w].addcmul_(later, taps[w])
            grad_taps[w] = (later * whole[:-w]).sum(0)
        grad_x, grad_halo = _remove(out, plan)
        return grad_x.to(x.dtype), grad_halo.to(x.dtype), grad_taps.flip(0).T.to(weight.dtype), None


def _taps(weight: Tensor) -> Tensor:
    """[taps, C], at least fp32: entry w is the weight of the token w before."""
    return weight.T.flip(0).to(torch.promote_types(weight.dtype, torch.float32))


def _inside(plan: HaloPlan, like: Tensor, w: int) -> Tensor:
    """1 for rows w, w + 1, ... whose document has a token w before, else 0: [n - w, 1]."""
    return (on_device(plan, like.device, "since")[w:] >= w).to(like.dtype)[:, None]


def _insert(x: Tensor, halo: Tensor, plan: HaloPlan) -> Tensor:
    """Rows with the halo rows at their places, at least fp32."""
    x, halo = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, halo))
    if not plan.inserts:
        return x
    parts, at, used = [], 0, 0
    for row, count in plan.inserts:
        parts += [x[at:row], halo[used : used + count]]
        at, used = row, used + count
    return torch.cat([*parts, x[at:]])


def _remove(whole: Tensor, plan: HaloPlan) -> tuple[Tensor, Tensor]:
    """Rows and halo rows apart: adjoint of `_insert`."""
    if not plan.inserts:
        return whole, whole[:0]
    rows, halos, at, shift = [], [], 0, 0
    for row, count in plan.inserts:
        rows.append(whole[at + shift : row + shift])
        halos.append(whole[row + shift : row + shift + count])
        at, shift = row, shift + count
    return torch.cat([*rows, whole[at + shift :]]), torch.cat(halos)
