"""Adapters to the CUDA attention kernels of other libraries; nothing here is imported or compiled before first use.

Windows: flash-attn and torch count the tokens to the *left* of a query, so `window` tokens with the token itself are
(window - 1, 0), where a right side of 0 is the causal rule. Where a document has more keys than queries, both align
the last query with the last key.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from raypack.errors import RaypackError
from raypack.kernels.exact import Chunk, Visible, chunks
from raypack.kernels.packing import Packing

BLOCK = 128


@lru_cache(maxsize=1)
def has_flash_attn() -> bool:
    """Whether flash-attn is there and loads (a build for another torch is installed but does not)."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


@lru_cache(maxsize=1)
def has_torch_varlen() -> bool:
    """Whether this torch has varlen attention with windows and grouped KV heads, as 2.13 has."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def flash_attn(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, keys: Packing, window: int | None, sinks: int, scale: float
) -> Tensor:
    """flash-attn 2's varlen kernel; a `kernels.attention.Kernel` without sinks."""
    _check_no_sinks("flash_attn", sinks)
    from flash_attn import flash_attn_varlen_func

    left = -1 if window is None else window - 1
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens(packing, q.device),
        cu_seqlens(keys, q.device),
        packing.longest,
        keys.longest,
        softmax_scale=scale,
        causal=True,
        window_size=(left, 0),
    )


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, keys: Packing, window: int | None, sinks: int, scale: float
) -> Tensor:
    """torch's own varlen attention; a `kernels.attention.Kernel` without sinks."""
    _check_no_sinks("torch_varlen", sinks)
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens(packing, q.device),
        cu_seqlens(keys, q.device),
        packing.longest,
        keys.longest,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)  # a pair only where auxiliary results were asked for
    return out


def flex(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, keys: Packing, window: int | None, sinks: int, scale: float
) -> Tensor:
    """torch's FlexAttention, compiled on first use; a `kernels.attention.Kernel` for as many keys as queries."""
    if keys is not packing:
        raise RaypackError("kernel flex takes no gathered keys: set train.kernel to auto, or plan.attention to ulysses")
    mask = packing.kept.keep(("flex", q.device, window, sinks), lambda: block_mask(packing, window, sinks, q.device))
    batched = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    out = _compiled_flex()(*batched, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _check_no_sinks(kernel: str, sinks: int) -> None:
    if sinks:
        raise RaypackError(f"kernel {kernel} has no sinks (model.sinks): set train.kernel to auto, flex or exact")


def block_mask(packing: Packing, window: int | None, sinks: int, device: torch.device) -> Any:
    """The `BlockMask` of a sliding window with sinks, or of all keys before, over packed documents.

    torch's own constructor tries every (query, key) pair; here the blocks come from `chunks`, so the work on the host
    is linear in tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows = [_key_blocks(chunk) for chunk in chunks(packing.lengths, window, sinks, BLOCK)]
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    indices = torch.zeros((len(rows), len(rows)), dtype=torch.int32)
    for row, blocks in zip(indices, rows, strict=True):
        row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    # Rows up to the next whole block: the kernel may ask the mask about them, and drops what it says.
    padding = -packing.tokens % BLOCK
    lengths = (*packing.lengths, padding) if padding else packing.lengths
    visible = Visible.of(lengths, window, sinks, device)

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible.mask(query, key)

    return BlockMask.from_kv_blocks(
        counts[None, None].to(device),
        indices[None, None].to(device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(packing.tokens, packing.tokens),
    )


def _key_blocks(chunk: Chunk) -> list[int]:
    """Blocks of keys that a block of queries needs, ascending."""
    own = range(chunk.key // BLOCK, (chunk.last - 1) // BLOCK + 1)
    sinks = range(chunk.sink // BLOCK, (chunk.sink_last - 1) // BLOCK + 1) if chunk.sink_last > chunk.sink else ()
    return sorted({*own, *sinks})


def cu_seqlens(packing: Packing, device: torch.device) -> Tensor:
    """Offsets as int32 [documents + 1] on `device`, made once a round."""

    def make() -> Tensor:
        host = torch.tensor(packing.offsets, dtype=torch.int32)
        return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)

    return packing.kept.keep(("cu_seqlens", device), make)
