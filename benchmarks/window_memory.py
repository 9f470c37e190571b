"""Peak memory and time of one sliding-window layer, forward and backward, on one document on the CPU.

Linear in tokens: twice the document, twice the bytes. Each size runs in a process of its own, since the peak of a
process never falls again; its memory before the layer starts is subtracted.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

WIDTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 512, 8, 2, 64, 1024
SIZES, QUICK_SIZES = (16_384, 32_768, 65_536), (4096, 8192, 16_384)
GROWTH_MAX = 2.15
TIMEOUT_SECONDS = 600
# glibc otherwise keeps freed tensors of up to 32 MiB in its heap, and short documents would look worse than long ones.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(8 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 20)}


@dataclass(frozen=True)
class Measured:
    """One size: tokens, peak bytes above the start, seconds of forward and backward."""

    tokens: int
    peak: int
    seconds: float


def main(quick: bool) -> None:
    """Print the table; an error where doubling the document more than doubles the peak."""
    rows = [_in_subprocess(tokens) for tokens in (QUICK_SIZES if quick else SIZES)]
    table = Table(
        title=f"one S layer: window {WINDOW}, width {WIDTH}, {HEADS}/{KV_HEADS} heads",
        caption="fp32, one thread, forward and backward",
    )
    for name in ("tokens", "peak MiB", "KiB a token", "growth", "seconds", "us a token"):
        table.add_column(name, justify="right")
    growths = [b.peak / a.peak for a, b in itertools.pairwise(rows)]
    for row, growth in zip(rows, [None, *growths], strict=True):
        table.add_row(
            f"{row.tokens:,}",
            f"{row.peak / 2**20:.0f}",
            f"{row.peak / 2**10 / row.tokens:.1f}",
            "" if growth is None else f"{growth:.2f}x",
            f"{row.seconds:.2f}",
            f"{row.seconds / row.tokens * 1e6:.1f}",
        )
    Console().print(table)
    if max(growths) > GROWTH_MAX:
        raise RuntimeError(f"peak memory grew {max(growths):.2f}x for twice the tokens: at most {GROWTH_MAX} is linear")


def _in_subprocess(tokens: int) -> Measured:
    command = [sys.executable, "-m", "benchmarks.window_memory", str(tokens)]
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | ALLOCATOR
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{tokens} tokens: {done.stderr.strip().splitlines()[-1]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _measure(tokens: int) -> Measured:
    import torch

    from raypack.kernels.attention import attention
    from raypack.kernels.packing import Packing
    from raypack.layers.projections import rope_table, rotate

    torch.set_num_threads(1)
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(WIDTH, 1e-6)
    project = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
    out = torch.nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def layer(count: int) -> None:
        x = torch.randn(count, WIDTH, requires_grad=True)
        table = rope_table(torch.arange(count), HEAD_DIM, 1e4, x.dtype)
        qkv = project(norm(x)).view(count, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = rotate(qkv, table, HEADS + KV_HEADS).split([HEADS, KV_HEADS, KV_HEADS], 1)
        y = attention(q, k, v, Packing([count]), window=WINDOW)
        (x + out(y.flatten(1))).sum().backward()

    layer(1024)  # libraries and thread pools are loaded before the start is read
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    layer(tokens)
    seconds = time.perf_counter() - start
    return Measured(tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, seconds)


if __name__ == "__main__":
    print(json.dumps(vars(_measure(int(sys.argv[1])))))
