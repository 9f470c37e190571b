"""The output head and its cross-entropy, `chunk_tokens` rows of logits at a time.

Gradients are made in the same pass as the loss, as the logits are at hand (Hsu et al. 2024, Liger Kernel): nothing but
the gradients of x and weight outlives a chunk. The loss is a sum and is never divided here: the divisor is the number
of valid labels of the whole step, which one rank does not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.errors import RaypackError

IGNORED = -100


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """Summed cross-entropy of `x @ weight.T` against `labels`.

    Args:
        x: [n, width].
        weight: [vocabulary, width].
        labels: int64 [n]; -100 = no label.
        chunk_tokens: rows of logits alive at once.

    Returns:
        0-dim, in promote_types(x.dtype, float32), as are logits and softmax. Without valid labels it is 0 and all
        gradients are 0.

    Raises:
        RaypackError: chunk_tokens below 1, or as many labels as rows missing.
    """
    if chunk_tokens < 1:
        raise RaypackError(f"chunk_tokens = {chunk_tokens}: must be at least 1 row of logits")
    if labels.shape != x.shape[:1]:
        raise RaypackError(f"{labels.shape[0]} labels for {x.shape[0]} rows: must be equal")
    return _Loss.apply(x, weight, labels, chunk_tokens, torch.is_grad_enabled())


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, with_grads: bool) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        grad_x = torch.empty_like(x) if with_grads and ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if with_grads and ctx.needs_input_grad[1] else None
        matrix = _operand(weight, wide)
        for first in range(0, x.shape[0], chunk_tokens):
            part = slice(first, first + chunk_tokens)
            rows, label = _operand(x[part], wide), labels[part, None]
            logits = _product(rows, matrix.T, wide)
            lse = torch.logsumexp(logits, -1, keepdim=True)
            valid, label = label != IGNORED, label.clamp(min=0)
            loss += torch.where(valid, lse - logits.gather(1, label), 0).sum()
            if grad_x is None and grad_weight is None:
                continue
            grad = logits.sub_(lse).exp_()
            grad.scatter_add_(1, label, grad.new_full(label.shape, -1.0))
            grad = _operand(grad.mul_(valid), matrix.dtype)
            if grad_x is not None:
                grad_x[part] = grad @ matrix
            if grad_weight is not None:
                grad_weight += _product(grad.T, rows, wide)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x * grad.to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None


def _operand(x: Tensor, wide: torch.dtype) -> Tensor:
    """What `_product` takes: half types stay on GPUs, whose matrix products can give fp32 from them."""
    return x if x.is_cuda else x.to(wide)


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a @ b, unrounded: in `wide` whatever the operands' dtype."""
    return a @ b if a.dtype == wide else torch.mm(a, b, out_dtype=wide)
