"""A linear model on simulated nodes, by LASP-2, LASP-1 and a ring of K and V: real exchanges, emulated compute.

Every rank sleeps for the time that the cost model gives its part of a layer on the cluster `h100-8x8`, and sends real
messages over links shaped 7:1 (network namespaces; root, else skipped). One second of the model takes 200 seconds here
(1,000 with 64 ranks), and messages have 1 / SHARE of the model's bytes over links that are as much slower, so that both
keep their proportion. A message also sleeps the cluster's latency, besides what gloo needs; LASP-2 hides its own behind
the work inside the shard.

Then `LLLF`: three LASP-2 layers and a full one, which gathers K and V (LASP-2H: the last rank's queries have the most
keys) or exchanges heads (Ulysses). Nobody has published that figure; seconds of the four layers.

The model has the sizes of a Llama 3 of 1B parameters, all layers linear, with a fixed decay: width 2048, 32 heads and 8
KV heads of 64, feed-forward 8192. 32K tokens a rank and less; forward and backward of two layers. `gain` = how much
faster LASP-2 is; published (64 GPUs, 2048K tokens, so 32K a rank): +15.2 % over LASP-1, +36.6 % over ring attention.
LASP-1 stands here twice: at its best, with a chain of sums only, and `in order`, as its authors' code has it, where a
shard's attention waits for the one before (`baselines.lasp1_published`): 7 hops on 8 ranks, 63 on 64.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from raypack.config import ModelConfig, load_cluster
from raypack.cost.rates import token_flops
from raypack.layers.costs import Costs
from raypack.layers.linear.kind import LINEAR
from raypack.plan.topology import Block, Topology
from tests.simulated_nodes import SimulatedCluster, why_not

MODEL = ModelConfig(
    name="linear-1b", pattern="L", layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, ffn_width=8192,
    linear_decay="head", vocabulary=128_256,
)  # fmt: skip
SHARE, LAYERS = 64, 2
# 64 ranks on one machine: gloo's 4,032 messages of a gather must stay small beside the work, so that all is slower.
CASES = (((4, 4), (2048, 8192, 32_768), 200.0, 3), ((8,) * 8, (32_768,), 1000.0, 0))
QUICK_CASES = (((2, 2), (2048,), 200.0, 1),)
METHODS = ("LASP-2", "LASP-1", "LASP-1 in order", "ring of K, V")
CHAINS = METHODS[:3]
HYBRIDS = ("LLLF, LASP-2H", "LLLF, Ulysses")
TIMEOUT_SECONDS = 1200


@dataclass(frozen=True)
class Times:
    """Forward seconds of one rank and layer, as slept: everything but the recurrence; a shard's state; what is inside
    shards; what an entering state adds; all causal pairs of the document, on one rank. Backward: twice as long."""

    dense: float
    state: float
    inside: float
    enter: float
    full: float

    @staticmethod
    def of(rows: int, world: int, slower: float) -> Times:
        each, model, cluster = token_flops(MODEL), MODEL, load_cluster("h100-8x8")
        chunk = LINEAR.work(MODEL).overhead
        scale, tokens = rows * slower / Costs(model, cluster).matmul_rate, rows * world
        state, enter = 2 * model.kv_heads * model.head_dim**2, 2 * model.heads * model.head_dim**2
        full = 4 * model.heads * model.head_dim * tokens * (tokens + 1) / 2
        full *= slower / (cluster.attention_share * cluster.peak_flops)
        return Times(
            (each.projections + each.feed_forward) * scale,
            state * scale,
            (chunk + state + enter) * scale,
            enter * scale,
            full,
        )


def main(quick: bool) -> None:
    reason = why_not()
    if reason:
        Console().print(f"skipped: {reason}")
        return
    table = Table(title="Linear model on simulated nodes, compute emulated, forward and backward")
    for column in ("nodes", "method"):
        table.add_column(column)
    for column in ("tokens", "seconds", "in the model, ms", "tokens/s in the model", "gain of the first"):
        table.add_column(column, justify="right")
    for nodes, sizes, slower, repeats in QUICK_CASES if quick else CASES:
        for rows, found in _on_nodes(nodes, sizes, slower, repeats).items():
            tokens = rows * sum(nodes)
            for methods in (METHODS, HYBRIDS):
                for method in (method for method in methods if method in found):
                    seconds = found[method]
                    gain = "" if method == methods[0] else f"{seconds / found[methods[0]] - 1:+.1%}"
                    table.add_row(
                        f"{len(nodes)} x {nodes[0]}", method, f"{tokens:,}", f"{seconds:.3f}",
                        f"{seconds / slower * 1e3:.2f}", f"{tokens * slower / seconds:,.0f}", gain,
                        end_section=method == methods[-1],
                    )  # fmt: skip
    Console().print(table)


def _on_nodes(
    nodes: tuple[int, ...], sizes: tuple[int, ...], slower: float, repeats: int
) -> dict[int, dict[str, float]]:
    """Seconds a layer by rows a rank and method; one run without a first one where `repeats` is 0, of chains only."""
    cluster = load_cluster("h100-8x8")
    inter, intra = (rate / SHARE / slower for rate in (cluster.inter_rate, cluster.intra_rate))
    with (
        tempfile.TemporaryDirectory() as folder,
        SimulatedCluster(list(nodes), inter_rate=inter, intra_rate=intra, ray=False) as simulated,
    ):
        out, first, running = Path(folder) / "out.json", 0, []
        for index, count in enumerate(nodes):
            work = {
                "first": first, "count": count, "nodes": nodes, "sizes": sizes, "repeats": repeats, "slower": slower,
                "store": str(Path(folder) / "store"), "out": str(out),
            }  # fmt: skip
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.linear_nodes", json.dumps(work)]
            running.append(simulated.popen(command, index + 1, cwd=Path(__file__).resolve().parent.parent))
            first += count
        codes = [process.wait(TIMEOUT_SECONDS) for process in running]
        if any(codes):
            raise RuntimeError(f"exit codes of the nodes: {codes}")
        return {int(rows): found for rows, found in json.loads(out.read_text()).items()}


def _node(work: dict[str, Any]) -> None:
    """One process a rank, forked so that torch is loaded once."""
    import torch

    torch.set_num_threads(1)
    children = []
    for rank in range(work["first"], work["first"] + work["count"]):
        child = os.fork()
        if child == 0:
            try:
                _rank(rank, work)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr)
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


def _rank(rank: int, work: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    world = sum(work["nodes"])
    dist.init_process_group(
        "gloo", init_method=f"file://{work['store']}", rank=rank, world_size=world,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )  # fmt: skip
    results: dict[int, dict[str, float]] = {}
    for rows in work["sizes"]:
        for method, layer in _methods(rows, rank, Topology(tuple(work["nodes"])), work["slower"]).items():
            if not work["repeats"] and method not in CHAINS:
                continue
            times: list[float] = []
            hybrid = method in HYBRIDS  # minutes long, and warm from what ran before
            for _ in range(1 if hybrid else work["repeats"] + 1):
                x = torch.zeros((), requires_grad=True)
                dist.barrier()
                started = time.perf_counter()
                y, count = x, 1 if hybrid else LAYERS
                for _ in range(count):
                    y = layer(y)
                y.backward()
                dist.barrier()
                times.append((time.perf_counter() - started) / count)
            results.setdefault(rows, {})[method] = statistics.median(times[1:] or times)
    if rank == 0:
        Path(work["out"]).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _methods(rows: int, rank: int, topology: Topology, slower: float) -> dict[str, Callable[[Any], Any]]:
    """One layer of each method, four of a hybrid: a 0-dim tensor in, one out."""
    import torch
    import torch.distributed as dist

    from benchmarks.baselines import lasp1, lasp1_published
    from benchmarks.emulate import RingOfKeys, SlowRing, gathered, swapped, work_for
    from raypack.comm.ledger import Ledger
    from raypack.comm.wire import Wire
    from raypack.exchange.lasp2.gather import finish, start
    from raypack.exchange.lasp2.states import plan_states
    from raypack.exchange.layout import Layout
    from raypack.plan.plan import Placement, Round

    whole, times = Block(0, topology.world), Times.of(rows, topology.world, slower)
    tokens = rows * topology.world
    layout = Layout(Round((Placement(0, tokens, whole, whole, 0),)), topology, rank)
    plan = plan_states(layout, rank, layout.segments(rank))
    wire = Wire({whole: dist.group.WORLD}, Ledger(topology, rank))  # type: ignore[arg-type]
    cluster, node_of = load_cluster("h100-8x8"), topology.node_of
    latencies = slower * cluster.intra_latency, slower * cluster.inter_latency
    ring = SlowRing(dist.group.WORLD, latency=lambda source: latencies[node_of[source] != node_of[rank]])
    side = int(MODEL.head_dim / SHARE**0.5)
    states, decay = torch.zeros(1, MODEL.kv_heads, side, side), torch.full((MODEL.kv_heads,), -0.01)
    keys = torch.zeros(2 * rows * MODEL.kv_heads * MODEL.head_dim // SHARE, dtype=torch.bfloat16)

    def lasp2(x: Any) -> Any:
        x = work_for(x, times.dense)
        flight, ticket = start(work_for(states + x, times.state), None, decay, plan, wire)
        inner = work_for(x, times.inside, latencies[len(topology.nodes) > 1])
        return work_for(inner + finish(ticket, flight).mean(), times.enter)

    def lasp_1(x: Any) -> Any:
        x = work_for(x, times.dense)
        state, inner = work_for(states[0] + x, times.state), work_for(x, times.inside)
        return work_for(inner + lasp1.incoming(state, decay, rows, ring).mean(), times.enter)

    def lasp_1_published(x: Any) -> Any:
        def attend(state: Any, y: Any) -> tuple[Any, Any]:
            y = work_for(y + state.mean(), times.inside + times.enter)
            return y, state + y

        return lasp1_published.in_order(attend, states[0], ring, work_for(x, times.dense))

    def ring_of_keys(x: Any) -> Any:
        inner = work_for(work_for(x, times.dense), times.inside)
        return work_for(RingOfKeys.apply(inner, keys, times.state, ring), times.enter)

    group, late = dist.group.WORLD, latencies[len(topology.nodes) > 1]
    kv = 2 * rows * MODEL.kv_heads * MODEL.head_dim // SHARE
    heads = rows * (MODEL.heads + 2 * max(MODEL.kv_heads, topology.world)) * MODEL.head_dim // SHARE
    outputs = rows * MODEL.heads * MODEL.head_dim // SHARE
    pairs = times.full * (2 * rank + 1) / topology.world**2  # of the queries in this rank's shard

    def full_gathered(x: Any) -> Any:
        return work_for(gathered(work_for(x, times.dense), kv, group, late), pairs)

    def full_exchanged(x: Any) -> Any:
        x = swapped(work_for(x, times.dense), heads, group, late)
        return swapped(work_for(x, times.full / topology.world), outputs, group, late)

    def hybrid(full: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: full(lasp2(lasp2(lasp2(x))))

    names = (*METHODS, *HYBRIDS)
    made = (lasp2, lasp_1, lasp_1_published, ring_of_keys, hybrid(full_gathered), hybrid(full_exchanged))
    return dict(zip(names, made, strict=True))


if __name__ == "__main__":
    _node(json.loads(sys.argv[1]))
