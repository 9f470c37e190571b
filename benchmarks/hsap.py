"""hsap against other ways to attend across 8 ranks, packs of 32,768 tokens: bytes, wall clock; and compile time.

Packs are drawn from length lists (the generators of `raypack simulate`, documents clipped at a pack). Attention of one
layer, forward and backward, from Q, K and V to outputs in each method's own token layout, on 2 nodes of 4 gloo ranks.

- Bytes: the ledgers', all ranks together. A method's copies to other ranks count, whatever route the backend takes.
- Wall clock: the same kernel in all, 4 query and 2 KV heads of 16, fp32, on this machine's cores, where both scopes are
  equally fast and waiting is free. `hsap_nodes` has links of 1 : 7 and emulated compute.

Targets: fewer bytes than all-gather KV and the zig-zag ring; a schedule for 256 documents on 32 ranks within 5 ms, for
4,096 on 256 within 50 ms, a look-up within 0.1 ms.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks import emulated
from benchmarks.hsap_methods import Method, methods, packs
from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import ModelConfig, load_cluster, load_model
from raypack.exchange.hsap.schedule import Signature, schedule_of
from raypack.exchange.hsap.transfers import STEP_ROWS, Pack, transfers_of
from raypack.plan.topology import Topology
from raypack.simulate.presets import length_preset

LISTS = ("wikipedia", "wlb128k", "prolong")
NODES, PACK = (4, 4), 32_768
TIMEOUT_SECONDS = 1800
BYTE_HEADS = {"32 query, 32 KV": (32, 32), "32 query, 4 KV": (32, 4), "8 query, 1 KV": (8, 1)}
TIME_HEADS = {"4 query, 2 KV": (4, 2)}
DIM = 16

Row = tuple[str, str, str, float, float, float]
"""Heads, list, method, intra bytes, inter bytes, seconds."""


def main(quick: bool) -> None:
    console = Console(width=112)
    compile_times(console, 3 if quick else 9)
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").Queue()
        arguments = (str(Path(folder) / "store"), quick, queue)
        processes = mp.spawn(_rank, args=arguments, nprocs=sum(NODES), join=False)
        counted, timed = queue.get(timeout=TIMEOUT_SECONDS)
        processes.join(timeout=60)
    for table in tables(counted, timed):
        console.print(table)


def compile_times(console: Console, repeats: int) -> None:
    """One rank's schedule from the documents' lengths and homes; ranks of nodes of 8."""
    table = Table(title="Compiling a schedule, one rank, milliseconds (median; worst list)")
    for column in ("documents", "ranks", "compile", "target", "look-up", "target "):
        table.add_column(column, justify="right")
    for documents, ranks, target in ((256, 32, 5.0), (4096, 256, 50.0)):
        compiled, looked_up = [], []
        for name in LISTS:
            times = [_compile(name, documents, ranks // 8, seed) for seed in range(repeats)]
            compiled.append(statistics.median(t[0] for t in times))
            looked_up.append(statistics.median(t[1] for t in times))
        table.add_row(
            f"{documents:,}", str(ranks), f"{max(compiled) * 1e3:.2f}", f"{target:g}",
            f"{max(looked_up) * 1e3:.3f}", "0.1",
        )  # fmt: skip
    console.print(table)


def _compile(name: str, documents: int, nodes: int, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(drawn(name, documents, seed), 131_072)
    homes = rng.integers(0, nodes, documents)
    schedule_of.cache_clear()
    transfers_of.cache_clear()
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        schedule_of(Signature((Pack(0, nodes, lengths.tobytes(), homes.tobytes()),), 0, STEP_ROWS))
        seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1]


def drawn(name: str, count: int, seed: int) -> np.ndarray:
    return length_preset(name).draw(count, seed)


def _rank(rank: int, store: str, quick: bool, queue: mp.Queue) -> None:
    torch.set_num_threads(1)
    world = sum(NODES)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    wire = Wire(Groups(Topology(NODES), torch.device("cpu"), TIMEOUT_SECONDS), Ledger(Topology(NODES), rank))
    with emulated.attention(0.0):
        counted = _measure_all(BYTE_HEADS, 1 if quick else 4, 0, rank, wire, quick)
    timed = _measure_all(TIME_HEADS, 1, 0 if quick else 1, rank, wire, quick)
    if rank == 0:
        queue.put((counted, timed))
    dist.barrier()
    dist.destroy_process_group()


def _measure_all(
    heads: dict[str, tuple[int, int]], count: int, repeats: int, rank: int, wire: Wire, quick: bool
) -> list[Row]:
    """Every list and method; `count` packs each."""
    cluster, network = load_cluster("h100-8x8"), load_model("1f3s-30b-a3b", {"pattern": "F"})
    rows = []
    for label, (queries, keys) in heads.items():
        model = ModelConfig(pattern="F", heads=queries, kv_heads=keys, head_dim=DIM, width=queries * DIM)
        for name in LISTS:
            for pack in packs(drawn(name, 100_000, 1), PACK // (8 if quick else 1), count):
                for method, make in methods(cluster, network).items():
                    rows.append((label, name, method, *measure(make(pack, rank, model, wire), model, wire, repeats)))
    return rows


def measure(method: Method, model: ModelConfig, wire: Wire, repeats: int) -> tuple[float, float, float]:
    """(intra bytes, inter bytes) of one forward and backward over all ranks, and median seconds."""
    tokens = sum(high - low for _, low, high in method.rows)
    vectors = model.heads + 2 * model.kv_heads
    x = torch.randn(tokens, vectors, model.head_dim).requires_grad_()
    grad = torch.randn(tokens, model.heads, model.head_dim)
    times = []
    for _ in range(repeats + 1):
        wire.ledger.take()
        dist.barrier()
        started = time.perf_counter()
        method.run(x).backward(grad)
        dist.barrier()
        times.append(time.perf_counter() - started)
        taken = wire.ledger.take()
    sent = Counter[str]()
    for (_, scope), count in (*taken.exchanged.items(), *taken.collected.items()):
        sent[scope] += count
    totals = torch.tensor([sent["intra"], sent["inter"]], dtype=torch.float64)
    dist.all_reduce(totals)
    return float(totals[0]), float(totals[1]), statistics.median(times[1:] or times)


def tables(counted: list[Row], timed: list[Row]) -> list[Table]:
    """Bytes, and wall clock; ratios to the first method, means over packs."""
    bytes_ = Table(title=f"MB sent, packs of {PACK:,} tokens (fp32, heads of {DIM}) on 2 nodes of 4")
    for column in ("heads", "lengths", "method", "intra", "inter", "all", "inter / hsap", "all / hsap"):
        bytes_.add_column(column, justify="left" if column in ("heads", "lengths", "method") else "right")
    for heads, name, method, near, far, _, base in _with_base(counted):
        bytes_.add_row(
            heads, name, method, f"{near / 1e6:.1f}", f"{far / 1e6:.1f}", f"{(near + far) / 1e6:.1f}",
            _ratio(far, base[1]), _ratio(near + far, base[0] + base[1]), end_section=method == "ulysses",
        )  # fmt: skip
    clock = Table(title="Wall clock of the same, one pack a list, real kernel on this machine's cores")
    for column in ("heads", "lengths", "method", "seconds", "seconds / hsap"):
        clock.add_column(column, justify="left" if column in ("heads", "lengths", "method") else "right")
    for heads, name, method, _, _, took, base in _with_base(timed):
        clock.add_row(heads, name, method, f"{took:.2f}", _ratio(took, base[2]), end_section=method == "ulysses")
    return [bytes_, clock]


def _with_base(rows: list[Row]) -> list[tuple[str, str, str, float, float, float, np.ndarray]]:
    """Rows of the same heads, list and method averaged, each with the figures of the first method."""
    groups: dict[tuple[str, str], dict[str, list[np.ndarray]]] = {}
    for heads, name, method, *figures in rows:
        groups.setdefault((heads, name), {}).setdefault(method, []).append(np.array(figures))
    out = []
    for (heads, name), found in groups.items():
        means = {method: np.mean(figures, axis=0) for method, figures in found.items()}
        base = next(iter(means.values()))
        out += [(heads, name, method, *mean.tolist(), base) for method, mean in means.items()]
    return out


def _ratio(value: float, base: float) -> str:
    if base == 0:
        return "-" if value == 0 else "inf"
    return f"{value / base:.2f}"
