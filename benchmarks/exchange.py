"""Exchange of Q, K, V (in) and of the output (out) against a bare all-to-all of the same bytes, 8 gloo ranks.

16,384 tokens, 32 query and 4 KV heads of 128, fp32. `ratio` = median exchange / median bare call, both timed in turns
in one run. `lower bound` = bare call + one contiguous copy of the sent bytes (rows must be arranged by destination),
over the bare call: what no exchange with one send buffer can beat. Ranks share the machine's cores, so the copies of 8
ranks run on 2 cores here.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.exchange.heads.plan import Exchange, Heads, build_exchange
from raypack.exchange.heads.run import to_heads, to_tokens
from raypack.exchange.layout import Layout
from raypack.plan.plan import Placement, Round
from raypack.plan.topology import Block, Topology

RANKS, TOKENS, HEADS, KV_HEADS, DIM = 8, 16_384, 32, 4, 128
TARGET = 1.4


def rounds() -> dict[str, Round]:
    """The shapes that policies make of 16,384 tokens."""

    def place(sample: int, length: int, parent: tuple[int, int], child: tuple[int, int]) -> Placement:
        return Placement(sample, length, Block(*parent), Block(*child), length - 1)

    eighth, world = TOKENS // RANKS, (0, RANKS)
    unequal = [eighth + d for d in (-700, 500, 200, -300, 100, 400, -600, 400)]
    return {
        "static: one width of 8": Round((place(0, TOKENS, world, world),)),
        "repack: 8 children of 1": Round(tuple(place(i, n, world, (i, 1)) for i, n in enumerate(unequal))),
        "repack: 2 children of 4": Round(tuple(place(i, TOKENS // 2, world, (4 * i, 4)) for i in range(2))),
        "repack: nested 4, 2, 1": Round(
            (
                *(place(i, 4096, world, (4 * i, 4)) for i in range(2)),
                *(place(2 + i, 1024, world, (2 * i, 2)) for i in range(4)),
                *(place(6 + i, 512, world, (i, 1)) for i in range(8)),
            )
        ),
        "joint: one wide, the rest at home": Round(
            (place(0, TOKENS // 2, world, (0, 4)), *(place(1 + i, 1024, (i, 1), (i, 1)) for i in range(8)))
        ),
    }


def main(quick: bool) -> None:
    repeats = 5 if quick else 15
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        queue = context.Queue()
        processes = mp.spawn(_rank, args=(str(Path(folder) / "store"), repeats, queue), nprocs=RANKS, join=False)
        rows = queue.get(timeout=600)
        processes.join(timeout=60)
    table = Table(title=f"Exchange / bare all-to-all, {RANKS} gloo ranks, {TOKENS} tokens, target at most {TARGET}")
    for column in ("plan", "exchange", "MB sent a rank", "bare ms", "exchange ms", "ratio", "lower bound"):
        table.add_column(column, justify="left" if column in ("plan", "exchange") else "right")
    for name, site, sent, bare, whole, bound in rows:
        table.add_row(
            name, site, f"{sent / 1e6:.1f}", f"{bare * 1e3:.1f}", f"{whole * 1e3:.1f}",
            f"{whole / bare:.2f}", f"{bound / bare:.2f}",
        )  # fmt: skip
    Console().print(table)


def _rank(rank: int, store: str, repeats: int, queue: mp.Queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=300)
    )
    topology = Topology((RANKS,))
    groups = Groups(topology, torch.device("cpu"), 300.0)
    wire = Wire(groups, Ledger(topology, rank))
    rows = []
    with torch.no_grad():
        for name, round_ in rounds().items():
            layout = Layout(round_, topology, rank)
            into = build_exchange(layout, rank, Heads(HEADS, KV_HEADS), full=True)
            out = build_exchange(layout, rank, Heads(HEADS, KV_HEADS, kv_travels=False), full=True)
            x = torch.randn(into.rows, HEADS + 2 * KV_HEADS, DIM)
            heads = [call.heads[1] - call.heads[0] for call in into.calls]
            received = to_heads(x, into, wire, "full_in")
            calls = [c[:, :n].contiguous() for c, n in zip(received, heads, strict=True)]
            run_in = partial(to_heads, x, into, wire, "full_in")
            run_out = partial(to_tokens, calls, out, wire, "full_out")
            rows.append((name, "Q, K, V in", *_compare(into, into.send, into.receive, groups, repeats, run_in)))
            rows.append((name, "output back", *_compare(out, out.receive, out.send, groups, repeats, run_out)))
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _compare(
    exchange: Exchange,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    groups: Groups,
    repeats: int,
    run: Callable[[], object],
) -> tuple[float, float, float, float]:
    """Bytes sent by rank 0, and median seconds: bare call, exchange, bare call after one copy."""
    group = groups[exchange.block]
    source, ready = torch.randn(sum(send), DIM), torch.empty(sum(send), DIM)

    def bare() -> torch.Tensor:
        out = torch.empty(sum(receive), DIM)
        dist.all_to_all_single(out, source, list(receive), list(send), group=group)
        return out

    def copied() -> torch.Tensor:
        ready.copy_(source)
        out = torch.empty(sum(receive), DIM)
        dist.all_to_all_single(out, ready, list(receive), list(send), group=group)
        return out

    times: dict[str, list[float]] = {"bare": [], "run": [], "copied": []}
    for _ in range(repeats + 1):
        for name, function in (("bare", bare), ("run", run), ("copied", copied)):
            dist.barrier(group)
            started = time.perf_counter()
            function()
            dist.barrier(group)
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return sum(send) * DIM * 4.0, medians["bare"], medians["run"], medians["copied"]
