"""Causal attention over packed documents: the one place where a kernel is chosen.

| device | dtype | sinks | kernel of `auto` |
|---|---|---|---|
| CUDA | bf16, fp16 | no | `flash_attn` (flash-attn's varlen) where importable, else `torch_varlen` |
| CUDA | bf16, fp16 | yes | `flex` (torch's FlexAttention with a block mask made on the host) |
| any other | any | any | `exact` (`kernels.exact`): plain torch, memory and time linear in tokens where windowed |

`train.kernel` names another one, also of one's own: any callable with the signature of `Kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypack.errors import RaypackError
from raypack.kernels import cuda as kernels_cuda
from raypack.kernels import exact as kernels_exact
from raypack.kernels import tail as kernels_tail
from raypack.kernels.packing import Packing
from raypack.registry import resolve

HALF = (torch.bfloat16, torch.float16)


class Kernel(Protocol):
    """What computes attention once `attention` has checked its arguments and made them plain.

    Args:
        q: [N, hq, D], N and hq at least 1; may be a strided view, as k and v, with the last dimension contiguous.
        k, v: [M, hkv, D], hq a multiple of hkv: query head i reads KV head `i // (hq // hkv)`.
        packing: documents of q, one after the other.
        keys: those of k and v, as many; the same object, or longer ones whose last tokens the queries are (then there
            is no window).
        window: tokens a query sees, itself included, below the longest document; None = all before it.
        sinks: first tokens of its document that a query sees too; 0 where there is no window.
        scale: of the scores.

    Returns:
        [N, hq, D], differentiable in q, k and v.

    Raises:
        RaypackError: something that it cannot do, with what to use instead.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packing: Packing,
        keys: Packing,
        window: int | None,
        sinks: int,
        scale: float,
    ) -> Tensor: ...


def _exact(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, keys: Packing, window: int | None, sinks: int, scale: float
) -> Tensor:
    if keys is not packing:
        return kernels_tail.attention(q, k, v, packing.lengths, keys.lengths, scale)
    return kernels_exact.attention(q, k, v, packing.lengths, window, sinks, scale)


_SHIPPED: dict[str, Kernel] = {
    "exact": _exact,
    "flash_attn": kernels_cuda.flash_attn,
    "torch_varlen": kernels_cuda.torch_varlen,
    "flex": kernels_cuda.flex,
}


def find_kernel(name: str) -> Kernel | None:
    """The kernel of a name of `plan.names.KERNELS`, or of `package.module:object`; None for `auto`.

    Raises:
        RaypackError: there is no such kernel.
    """
    kernel: Kernel | None = resolve(name, {"auto": None, **_SHIPPED}, "train.kernel")
    return kernel


def select_backend(device: torch.device | str, dtype: torch.dtype, *, sinks: bool = False) -> str:
    """The name of the kernel that `attention` uses for tensors of this kind where none is given (table above)."""
    if torch.device(device).type != "cuda" or dtype not in HALF:
        return "exact"
    if sinks:
        return "flex"
    if kernels_cuda.has_flash_attn():
        return "flash_attn"
    return "torch_varlen" if kernels_cuda.has_torch_varlen() else "exact"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing | Sequence[int],
    *,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    kv_of_q: tuple[int, ...] | None = None,
    keys: Packing | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Softmax attention of each document over itself, causal.

    Args:
        q: [N, hq, D]. May be a strided view, as `k` and `v` (last dimension contiguous). Views of one packed tensor
            are best made with `split`: its backward is a single `cat`.
        k, v: [N, hkv, D].
        packing: the documents; their lengths add up to N.
        window: tokens a query sees, itself included; None = all before it.
        sinks: first tokens of the document that every later query of it sees besides the window.
        scale: of the scores; None = D ** -0.5.
        kv_of_q: the KV head of each query head; None = plain GQA, `i // (hq // hkv)`.
        keys: rows of each document in k and v, where these have more than q: queries are then its last tokens. Without
            a window only. None = as `packing`.
        kernel: what computes it; None = the best one for device and dtype.

    Returns:
        [N, hq, D]. With no tokens or no query heads still part of the graph: q, k and v get zero gradients.

    Raises:
        RaypackError: lengths, heads or window that do not fit, or a kernel that cannot do this.
    """
    if not isinstance(packing, Packing):
        packing = Packing(packing)
    keys = keys or packing
    _check(q, k, v, packing, keys, window, sinks, kv_of_q)
    if q.shape[0] == 0 or q.shape[1] == 0:
        return q + (k[:0].sum() + v[:0].sum())
    if kv_of_q is not None and not _is_plain(kv_of_q, k.shape[1]):
        k, v = _ExpandHeads.apply(k, kv_of_q), _ExpandHeads.apply(v, kv_of_q)
    if window is not None and window >= packing.longest:
        window = None
    sinks = 0 if window is None else sinks
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if kernel is None:
        kernel = _SHIPPED[select_backend(q.device, q.dtype, sinks=sinks > 0)]
    return kernel(q, k, v, packing, keys, window, sinks, scale)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    keys: Packing,
    window: int | None,
    sinks: int,
    kv_of_q: tuple[int, ...] | None,
) -> None:
    if (q.shape[0], k.shape[0], v.shape[0]) != (packing.tokens, keys.tokens, keys.tokens):
        raise RaypackError(
            f"attention of {packing.tokens} packed tokens over {keys.tokens} got q, k, v of {q.shape[0]}, "
            f"{k.shape[0]}, {v.shape[0]} rows: they must be equal"
        )
    if keys is not packing and (
        window is not None
        or len(keys.lengths) != len(packing.lengths)
        or any(m > n for m, n in zip(packing.lengths, keys.lengths, strict=True))
    ):
        raise RaypackError(
            f"attention of {packing} over {keys}, window {window}: give as many documents, each with no fewer keys "
            "than queries, and no window"
        )
    if window is not None and window < 1:
        raise RaypackError(f"window = {window}: must be at least 1, the token itself")
    if sinks < 0:
        raise RaypackError(f"sinks = {sinks}: must be at least 0")
    heads, kv_heads = q.shape[1], k.shape[1]
    if v.shape[1] != kv_heads:
        raise RaypackError(f"k has {kv_heads} heads and v {v.shape[1]}: must be equal")
    if kv_of_q is None:
        if heads and (kv_heads == 0 or heads % kv_heads):
            raise RaypackError(f"{heads} query heads are no multiple of {kv_heads} KV heads: give kv_of_q")
    elif len(kv_of_q) != heads or any(not 0 <= j < kv_heads for j in kv_of_q):
        raise RaypackError(f"kv_of_q = {kv_of_q}: must name one of {kv_heads} KV heads for each of {heads} query heads")


def _is_plain(kv_of_q: tuple[int, ...], kv_heads: int) -> bool:
    """Whether the mapping is what every kernel does by itself: equal runs, in order."""
    share, rest = divmod(len(kv_of_q), kv_heads)
    return rest == 0 and all(j == i // share for i, j in enumerate(kv_of_q))


class _ExpandHeads(torch.autograd.Function):
    """[N, hkv, D] -> [N, hq, D] by `kv_of_q`. The backward sums each head's copies in a fixed order, at least in fp32,
    where that of `index_select` is an atomic scatter on GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kv_of_q: tuple[int, ...]) -> Tensor:
        ctx.kv_of_q, ctx.kv_heads = kv_of_q, x.shape[1]
        return torch.stack([x[:, j] for j in kv_of_q], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        out = grad.new_zeros((grad.shape[0], ctx.kv_heads, grad.shape[2]))
        for j in range(ctx.kv_heads):
            copies = [i for i, head in enumerate(ctx.kv_of_q) if head == j]
            out[:, j] = grad[:, copies].sum(1, dtype=wide)
        return out, None
