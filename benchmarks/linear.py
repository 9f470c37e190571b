"""One linear-attention layer over 8 gloo ranks: LASP-2, LASP-1, a ring of K and V; and softmax ring attention.

One document of 16K to 256K tokens, cut evenly, forward and backward from q, k and v; 2 heads of 64, fp32, a fixed decay
a head. `MB` = sent by the rank that sends most; `chain` = messages that each had to wait for the one before. The wall
clock is that of 8 ranks on the machine's cores: a rank that waits leaves its core to others, so waiting is free here
and rings look better than they are. No target; `linear_nodes` is the benchmark of waiting. Softmax attention is
quadratic and is timed at 16K tokens only; what it sends is what the ring of K and V sends.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.baselines import lasp1, linear_ring, ring
from benchmarks.baselines.neighbours import Ring
from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.exchange.lasp2.states import plan_states
from raypack.exchange.layout import Layout
from raypack.layers.linear.module import linear_attention
from raypack.plan.plan import Placement, Round
from raypack.plan.topology import Block, Topology

RANKS, HEADS, DIM, CHUNK = 8, 2, 64, 64
SIZES, QUICK_SIZES = (16_384, 32_768, 65_536, 131_072, 262_144), (16_384, 32_768)
SOFTMAX_MOST = 16_384
TIMEOUT_SECONDS = 1200
METHODS = ("LASP-2", "LASP-1", "ring of K, V", "softmax ring")

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Callable[[], tuple[int, int]]]]
"""q, k, v -> outputs, and what to ask for (bytes sent, chained messages) after the backward."""


def main(quick: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").Queue()
        arguments = (str(Path(folder) / "store"), QUICK_SIZES if quick else SIZES, queue)
        processes = mp.spawn(_rank, args=arguments, nprocs=RANKS, join=False)
        rows = queue.get(timeout=TIMEOUT_SECONDS)
        processes.join(timeout=60)
    table = Table(title=f"Attention of one layer over {RANKS} gloo ranks, forward and backward")
    for column in ("tokens", "method", "MB", "chain", "ms", "ms / LASP-2"):
        table.add_column(column, justify="left" if column == "method" else "right")
    base = {tokens: seconds for tokens, method, _, _, seconds in rows if method == METHODS[0]}
    for tokens, method, sent, chain, seconds in rows:
        timed = ("", "") if seconds is None else (f"{seconds * 1e3:.0f}", f"{seconds / base[tokens]:.2f}")
        table.add_row(f"{tokens:,}", method, f"{sent / 1e6:.2f}", str(chain), *timed, end_section=method == METHODS[-1])
    Console().print(table)
    states = {sent for _, method, sent, _, _ in rows if method == METHODS[0]}
    if len(states) > 1:
        raise RuntimeError(f"LASP-2 sent {sorted(states)} bytes for different sizes: must not depend on tokens")


def _rank(rank: int, store: str, sizes: tuple[int, ...], queue: mp.Queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    groups = Groups(Topology((RANKS,)), torch.device("cpu"), TIMEOUT_SECONDS)
    rows = []
    for tokens in sizes:
        for method, run in _methods(tokens, rank, groups).items():
            if method == METHODS[-1] and tokens > SOFTMAX_MOST:
                ring_sent = next(r for r in rows if r[:2] == (tokens, METHODS[-2]))
                rows.append((tokens, method, ring_sent[2], ring_sent[3], None))
                continue
            rows.append((tokens, method, *_measure(run, tokens // RANKS, 3 if tokens <= SOFTMAX_MOST else 1)))
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _methods(tokens: int, rank: int, groups: Groups) -> dict[str, Run]:
    """Every method for one document of `tokens`."""
    topology, whole = groups.topology, Block(0, RANKS)
    layout = Layout(Round((Placement(0, tokens, whole, whole, tokens - 1),)), topology, rank)
    plan = plan_states(layout, rank, layout.segments(rank))
    decay = torch.tensor([-0.03, -0.002])

    def lasp2(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Callable[[], tuple[int, int]]]:
        wire = Wire(groups, Ledger(topology, rank))
        out = linear_attention(q.unsqueeze(2), k, v, decay, plan, wire, CHUNK)
        return out, lambda: (sum(wire.ledger.collected.values()), 2)

    def along(attention: Callable[..., Tensor], *more: object) -> Run:
        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Callable[[], tuple[int, int]]]:
            counted = Ring(groups[whole])
            return attention(q, k, v, *more, counted), lambda: (counted.sent, counted.steps)

        return run

    def linear(module: object) -> Callable[..., Tensor]:
        return lambda q, k, v, counted: module.attention(q.unsqueeze(2), k, v, decay, counted, CHUNK)  # type: ignore[attr-defined]

    runs = (lasp2, along(linear(lasp1)), along(linear(linear_ring)), along(ring.attention))
    return dict(zip(METHODS, runs, strict=True))


def _measure(run: Run, rows: int, repeats: int) -> tuple[int, int, float]:
    """Bytes of the rank that sends most, chained messages, median seconds; after one run to warm up."""
    q, k, v = (torch.randn(rows, HEADS, DIM).requires_grad_() for _ in range(3))
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        out, counted = run(q, k, v)
        out.sum().backward()
        dist.barrier()
        times.append(time.perf_counter() - started)
    totals = torch.tensor(counted())
    dist.all_reduce(totals, dist.ReduceOp.MAX)
    return int(totals[0]), int(totals[1]), statistics.median(times[1:])
