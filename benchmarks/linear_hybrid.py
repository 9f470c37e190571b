"""LLLF hybrids: K and V of the full layers gathered (LASP-2H) against heads exchanged (Ulysses), tokens per second.

First by the cost model: `lllf-7b` with fewer or more KV heads on blocks of 2 to 8 ranks of `h100-8x8`, one document or
many per block. Queries that stay where they are save bytes with few KV heads and cost balance with long documents.
Then measured: a small model, forward and backward over 8 gloo ranks that share the machine's cores, where arithmetic is
serial, so that imbalance costs nothing and only bytes and launches count. No target.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import ModelConfig, load_cluster, load_model
from raypack.layers.frame import build_frame
from raypack.model.decoder import HybridModel, initialize
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block, Topology
from raypack.planning.evaluate import evaluate

RANKS, TIMEOUT_SECONDS = 8, 900
ATTENTIONS = ("ulysses", "kv_gather")
MODELLED = [(width, kv_heads, documents) for width in (2, 4, 8) for kv_heads in (1, 8) for documents in (1, 64)]
RANK_TOKENS = 4096
SIZES, QUICK_SIZES = (4096, 16_384), (2048,)
SMALL = ModelConfig(
    pattern="LLLF", layers=4, width=128, heads=8, kv_heads=1, head_dim=32, linear_decay="head", ffn_width=256
)


def plan_of(width: int, tokens: int, documents: int, attention: str) -> Plan:
    """One block, `documents` of equal length."""
    block, length = Block(0, width), tokens // documents
    placements = tuple(Placement(i, length, block, block, length - 1, attention) for i in range(documents))
    return Plan((width,), (Round(placements),))


def main(quick: bool) -> None:
    _modelled()
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").Queue()
        arguments = (str(Path(folder) / "store"), QUICK_SIZES if quick else SIZES, 1 if quick else 3, queue)
        processes = mp.spawn(_rank, args=arguments, nprocs=RANKS, join=False)
        rows = queue.get(timeout=TIMEOUT_SECONDS)
        processes.join(timeout=60)
    table = Table(title=f"Measured: small LLLF, one KV head, {RANKS} gloo ranks, one document")
    for column in ("tokens", "Ulysses tokens/s", "LASP-2H tokens/s", "ratio"):
        table.add_column(column, justify="right")
    for tokens, seconds in rows:
        rates = [tokens / seconds[attention] for attention in ATTENTIONS]
        table.add_row(f"{tokens:,}", *(f"{rate:,.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}")
    Console().print(table)


def _modelled() -> None:
    table = Table(title=f"Cost model: lllf-7b on h100-8x8, {RANK_TOKENS:,} tokens a rank")
    for column in ("ranks", "KV heads", "documents", "Ulysses tokens/s", "LASP-2H tokens/s", "ratio"):
        table.add_column(column, justify="right")
    cluster = load_cluster("h100-8x8", {"rank_tokens_max": 1 << 20})
    for width, kv_heads, documents in MODELLED:
        model, tokens = load_model("lllf-7b", {"kv_heads": kv_heads}), width * RANK_TOKENS
        plans = [plan_of(width, tokens, documents, attention) for attention in ATTENTIONS]
        rates = [tokens / evaluate(plan, cluster, model).seconds for plan in plans]
        table.add_row(
            str(width), str(kv_heads), str(documents), *(f"{rate:,.0f}" for rate in rates), f"{rates[1] / rates[0]:.3f}"
        )
    Console().print(table)


def _rank(rank: int, store: str, sizes: tuple[int, ...], repeats: int, queue: mp.Queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    topology = Topology((RANKS,))
    wire = Wire(Groups(topology, torch.device("cpu"), TIMEOUT_SECONDS), Ledger(topology, rank))
    model = HybridModel(SMALL)
    initialize(model, SMALL, seed=0)
    rows = []
    for tokens in sizes:
        seconds = {a: _measure(model, plan_of(RANKS, tokens, 1, a), rank, wire, repeats) for a in ATTENTIONS}
        rows.append((tokens, seconds))
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _measure(model: HybridModel, plan: Plan, rank: int, wire: Wire, repeats: int) -> float:
    """Median seconds of forward and backward, after one to warm up."""
    frame = build_frame(plan.rounds[0], plan.topology, rank, SMALL)
    tokens = torch.zeros(frame.rows, dtype=torch.int64)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        model(tokens, tokens, frame, wire).backward()
        dist.barrier()
        times.append(time.perf_counter() - started)
        model.zero_grad()
    return statistics.median(times[1:])
