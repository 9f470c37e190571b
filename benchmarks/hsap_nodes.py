"""hsap against other ways to attend, in time: 2 nodes of 4 ranks, links of 1 : 7, emulated compute.

Every rank sleeps for what its part of a layer would take on a rank of the `h100-8x8` preset, and sends real messages
over links shaped to the preset's rates, one card a rank (network namespaces; needs root). Everything is slowed down
alike: heads have 16 numbers in place of 128, links run at 1 / (8 x SLOWER) of the preset's rates, compute at
1 / SLOWER. So the ratio of compute to communication is the preset's, and a rank that waits, waits. Added delay cannot
be simulated here, so latencies are the machine's own.

The model is `1f3s-30b-a3b` with full attention in every layer: 32 query and 4 KV heads of 128; packs of 32,768 tokens
from length lists. `attention`: one layer's, forward and backward, from Q, K and V to outputs. `layer`: with projections
and experts, which take longest where most tokens are. Target: quicker than all-gather KV and the zig-zag ring.

By the cost model, on the same ranks: tokens/s of the whole model over naive packing (a pack is one causal sequence, its
documents mixed) and over padding (every document padded to the pack's longest); the published figures for hsap are
+42 % and +180 % at 32K.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import emulated
from benchmarks.hsap import LISTS, NODES, PACK, drawn
from benchmarks.hsap_methods import Method, methods, packs
from benchmarks.rank_links import shape_ranks
from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import ModelConfig, load_cluster, load_model
from raypack.layers.costs import Costs
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.samples import Samples
from raypack.plan.topology import Block, Topology
from raypack.planning.evaluate import evaluate
from raypack.planning.policies import make_plan
from tests.simulated_nodes import SimulatedCluster, why_not

SLOWER, DIM = 400, 16
TIMEOUT_SECONDS = 1500.0
PACKS = 3


def main(quick: bool) -> None:
    console = Console(width=112)
    console.print(throughput_table(2 if quick else 10))
    if reason := why_not():
        console.print(f"no time measured: {reason}")
        return
    count, lists = (1, LISTS[2:]) if quick else (PACKS, LISTS)
    console.print(time_table(_run(count, lists)))


def _run(count: int, lists: tuple[str, ...]) -> list[tuple[str, str, str, float]]:
    """(list, method, what, seconds) as rank 0 printed them; ranks are processes inside the namespaces."""
    preset, topology = load_cluster("h100-8x8"), Topology(NODES)
    rates = [rate / SLOWER / (128 / DIM) for rate in (preset.intra_rate, preset.inter_rate)]
    with tempfile.TemporaryDirectory() as folder, SimulatedCluster([1] * topology.world, ray=False) as cluster:
        shape_ranks(cluster, topology, *rates)
        out, processes = Path(folder) / "rows", []
        for rank in range(topology.world):
            arguments = [str(rank), str(Path(folder) / "store"), str(out), str(count), *lists]
            command = [sys.executable, "-m", "benchmarks.hsap_nodes", *arguments]
            processes.append(cluster.popen(command, 1 + rank, env={"OMP_NUM_THREADS": "1"}, cwd=os.getcwd()))
        try:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if any(codes):
            raise subprocess.CalledProcessError(max(codes), "benchmarks.hsap_nodes")
        rows = [line.split("\t") for line in out.read_text(encoding="utf-8").splitlines()]
    return [(name, method, what, float(seconds)) for name, method, what, seconds in rows]


def _rank(rank: int, store: str, out: str, count: int, lists: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=sum(NODES),
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    wire = Wire(Groups(Topology(NODES), torch.device("cpu"), TIMEOUT_SECONDS), Ledger(Topology(NODES), rank))
    preset, network = load_cluster("h100-8x8"), load_model("1f3s-30b-a3b", {"pattern": "F"})
    model = ModelConfig(pattern="F", heads=network.heads, kv_heads=network.kv_heads, head_dim=DIM, width=512)
    costs = Costs(network, preset)
    token_seconds = SLOWER * costs.layer_seconds("none")
    with emulated.attention(0.0):  # connections are made at their first use
        for make in methods(preset, network).values():
            layer_seconds(make([600, 300, 100, 24], rank, model, wire), model, 0.0)
    rows = []
    with emulated.attention(SLOWER * costs.pair_seconds / network.heads, SLOWER * preset.launch_seconds):
        for name in lists:
            for pack in packs(drawn(name, 100_000, 1), PACK, count):
                for method, make in methods(preset, network).items():
                    made = make(pack, rank, model, wire)
                    for what, seconds in (("attention", 0.0), ("layer", token_seconds)):
                        rows.append((name, method, what, layer_seconds(made, model, seconds)))
    if rank == 0:
        text = "".join("\t".join(map(str, row)) + "\n" for row in rows)
        Path(out).write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def layer_seconds(method: Method, model: ModelConfig, token_seconds: float) -> float:
    """One layer forward and backward, `token_seconds` a token besides attention; the same on every rank."""
    tokens = sum(high - low for _, low, high in method.rows)
    vectors = model.heads + 2 * model.kv_heads
    x = torch.zeros(tokens, vectors, DIM, dtype=torch.bfloat16).requires_grad_()
    grad = torch.zeros(tokens, model.heads, DIM, dtype=torch.bfloat16)
    dist.barrier()
    started = time.perf_counter()
    out = method.run(x)
    # Projections and experts, forward and backward: a third and two thirds of all passes.
    time.sleep(tokens * token_seconds)
    out.backward(grad)
    dist.barrier()
    return time.perf_counter() - started


def time_table(rows: list[tuple[str, str, str, float]]) -> Table:
    table = Table(title=f"Milliseconds of one layer / {SLOWER}, packs of {PACK:,}, 2 nodes of 4, links 1 : 7")
    for column in ("lengths", "method", "attention", "/ hsap", "layer", "/ hsap ", "attention share"):
        table.add_column(column, justify="left" if column in ("lengths", "method") else "right")
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, method, what, seconds in rows:
        found.setdefault(name, {}).setdefault(method, {}).setdefault(what, []).append(seconds / SLOWER * 1e3)
    for name, by_method in found.items():
        means = {m: {what: statistics.mean(times) for what, times in each.items()} for m, each in by_method.items()}
        base = next(iter(means.values()))
        for method, mean in means.items():
            attention, layer = mean["attention"], mean["layer"]
            table.add_row(
                name, method, f"{attention:.2f}", f"{attention / base['attention']:.2f}", f"{layer:.2f}",
                f"{layer / base['layer']:.2f}", f"{100 * attention / layer:.0f} %",
                end_section=method == list(means)[-1],
            )  # fmt: skip
    return table


def throughput_table(count: int) -> Table:
    """Tokens/s by the cost model, as the published comparisons have it."""
    cluster = load_cluster("h100-8x8", {"rank_tokens_max": 1_000_000})
    model = load_model("1f3s-30b-a3b", {"pattern": "F"})
    topology, whole = Topology(NODES), Block(0, sum(NODES))
    costs = Costs(model, cluster)
    table = Table(title=f"Tokens/s of {model.name} with full attention only, packs of {PACK:,}, by the cost model")
    for column in ("lengths", "attention share", "hsap / naive packing", "hsap / padding"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for name in LISTS:
        shares, naive, padded = [], [], []
        for pack in packs(drawn(name, 100_000, 1), PACK, count):
            n = np.array(pack)
            made = make_plan(Samples.of_lengths(n), topology, cluster, model, "joint", attention="hsap")
            seconds = evaluate(made, cluster, model).seconds
            pairs = (
                float(costs.layers[0].pairs(n).sum())
                * costs.layers[0].count
                * costs.layers[0].attention_seconds("none")
            )
            shares.append(pairs / sum(NODES) / seconds)
            for lengths, ratios in (([PACK], naive), ([int(n.max())] * len(n), padded)):
                one = tuple(Placement(i, k, whole, whole, k - 1) for i, k in enumerate(lengths))
                ratios.append(evaluate(Plan(NODES, (Round(one),)), cluster, model).seconds / seconds)
        table.add_row(
            name, f"{100 * statistics.mean(shares):.0f} %", f"{statistics.mean(naive):.2f}",
            f"{statistics.mean(padded):.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
