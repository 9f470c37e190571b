"""What a CPU rank attains in matrix products: the denominator of MFU where no data sheet gives one. Never for plans."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def matmul_rate(group: dist.ProcessGroup | None, dtype: torch.dtype, seconds: float = 0.3, size: int = 512) -> float:
    """FLOP/s of one rank in `size`-cubed products, all ranks at once (they may share cores); mean over the ranks."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    torch.mm(a, b)
    if group is not None:
        dist.barrier(group)
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        torch.mm(a, b)
        count += 1
    rate = torch.tensor(2.0 * size**3 * count / elapsed, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(rate, group=group)
        rate /= dist.get_world_size(group)
    return float(rate)
