"""`raypack calibrate`: measure the ranks at hand and write a cluster file for `--cluster`."""

from __future__ import annotations

import math
import os
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from raypack.calibrate.fit import LineFit
from raypack.calibrate.result import Calibration, Measurements, Wanted, check_equal, rough, to_data, to_toml
from raypack.calibrate.result import calibrate as fit_figures
from raypack.commands.common import STANDARD_OUTPUT, OutputFile, handle_errors, json_option, people_console, write_json
from raypack.config import load_model
from raypack.errors import RaypackError
from raypack.files import write_file
from raypack.plan.topology import Topology

RANKS_A_CORE = 16
"""Ranks that one core can start before the measurement's time is up."""


@click.command(context_settings={"show_default": True, "max_content_width": 120})
@click.option("--out", required=True, type=OutputFile(".toml"), help="Write the cluster file here (.toml).")
@click.option("--ranks", type=int, default=None, help="Ranks; default: one a GPU of this machine, else one a core.")
@click.option("--nodes", default="", help="Ranks of each simulated node, e.g. 4,4, for trials; default: one node.")
@click.option("--ray", default="", help="Use a Ray cluster: HOST:PORT, auto, or local (a new one); needs --ranks.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: CUDA where there is.")
@click.option("--model", default="", help="Model preset or .toml file to measure round_seconds with; default: not.")
@click.option("--shard", type=click.Choice(["none", "world"]), default="none", help="That model's parameters.")
@click.option("--peak-flops", type=float, default=None, help="FLOP/s of one rank; default: data sheet, else measured.")
@click.option("--repeats", type=int, default=10, help="Timed calls of each point; the median counts.")
@click.option("--timeout", type=float, default=300.0, help="Seconds until the measurement is given up.")
@json_option
@handle_errors
def calibrate(
    out: str,
    ranks: int | None,
    nodes: str,
    ray: str,
    device: str,
    model: str,
    shard: str,
    peak_flops: float | None,
    repeats: int,
    timeout: float,
    json_target: str | None,
) -> None:
    """Measure matrix products, attention and all-to-alls inside and across nodes, and fit a line to each.

    Alone, it starts processes on this machine (gloo on CPUs, NCCL on GPUs). On several machines use --ray, or start
    it once a rank: torchrun --nnodes N --nproc-per-node 8 ... -m raypack.cli calibrate --out FILE.toml
    """
    check(peak_flops, repeats, timeout)
    if nodes or ranks is not None:
        topology_of(ranks, nodes, device)
    wanted = Wanted(repeats, timeout, load_model(model) if model else None, shard)
    found = measured(ranks, nodes, ray, device, wanted)
    if found is None:
        return
    made = fit_figures(found, peak_flops=peak_flops, name=Path(out).stem)
    console = people_console(json_target)
    if json_target != STANDARD_OUTPUT:
        show(made, console)
    write_file(out, to_toml(made))
    if json_target != STANDARD_OUTPUT:
        console.print(f"written to {out}: use it as --cluster {out}", highlight=False, soft_wrap=True)
    if json_target:
        write_json(to_data(made), json_target)


def measured(ranks: int | None, nodes: str, address: str, device: str, wanted: Wanted) -> Measurements | None:
    """What the ranks at hand measured; None on the ranks of torchrun that have nothing to say."""
    # torch takes seconds to import: not for --help.
    from raypack.calibrate.ranks import device_kind, join_torchrun, spawn_ranks, under_torchrun

    if under_torchrun():
        if ranks is not None or nodes or address:
            raise RaypackError("torchrun has started the ranks; leave --ranks, --nodes and --ray out")
        rank, found = join_torchrun(device, wanted)
        return found if rank == 0 else None
    with Console(stderr=True).status("measuring"):
        if address:
            return on_ray(ranks, nodes, address, device, wanted)
        kind = device_kind(device)
        topology = topology_of(ranks, nodes, kind)
        if topology.world > RANKS_A_CORE * cores():
            raise RaypackError(
                f"ranks = {topology.world}: this machine has {cores()} cores, enough for {RANKS_A_CORE * cores()} "
                "ranks; ask for fewer"
            )
        return spawn_ranks(topology, kind, wanted)


def on_ray(ranks: int | None, nodes: str, address: str, device: str, wanted: Wanted) -> Measurements:
    if nodes or ranks is None or ranks < 1:
        raise RaypackError(f"ray = {address}: give --ranks (at least 1) and no --nodes, the machines are the nodes")
    if device == "auto":
        raise RaypackError(f"ray = {address}: say --device cpu or cuda; this machine need not be like the workers")
    from raypack.calibrate.on_ray import ray_ranks

    return ray_ranks(address, ranks, device, wanted)


def check(peak_flops: float | None, repeats: int, timeout: float) -> None:
    """Raises RaypackError for what would fail only after minutes of measuring."""
    for name, value in (("repeats", repeats), ("timeout", timeout), ("peak-flops", peak_flops)):
        if value is not None and not 0 < value < math.inf:
            raise RaypackError(f"{name} = {value:g}: must be a number above 0")


def topology_of(ranks: int | None, nodes: str, device: str) -> Topology:
    """The ranks to start, on one node or on the simulated ones.

    Raises:
        RaypackError: a number that is none, nodes of unequal size, or nodes that do not add up to the ranks.
    """
    if not nodes:
        world = default_ranks(device) if ranks is None else ranks
        if world < 1:
            raise RaypackError(f"ranks = {world}: must be at least 1")
        return Topology((world,))
    parts = [part.strip() for part in nodes.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise RaypackError(f"nodes = {nodes!r}: must be rank counts separated by commas, e.g. 4,4")
    topology = Topology(tuple(int(part) for part in parts))
    check_equal(topology.nodes)
    if ranks is not None and ranks != topology.world:
        raise RaypackError(f"nodes = {nodes} add up to {topology.world}, not to ranks = {ranks}; leave one of them out")
    return topology


def default_ranks(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.device_count()
    return cores()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rate_text(what: str, fit: LineFit) -> str:
    if what == "rounds":
        return f"{1e3 / fit.rate:.4g} ms each"
    unit, scale = ("GB/s", 1e9) if what in ("intra", "inter") else ("TFLOP/s", 1e12)
    return f"{fit.rate / scale:.4g} {unit}"


def show(made: Calibration, console: Console) -> None:
    """The table for people: one line a fit."""
    cluster = made.cluster
    table = RichTable(
        title=f"{cluster.nodes} x {cluster.ranks_per_node} ranks: seconds = fixed + amount / rate", box=box.SIMPLE_HEAD
    )
    table.add_column("of one rank")
    for column in ("rate", "fixed us", "R^2", "worst point", "points"):
        table.add_column(column, justify="right")
    for what, fit in made.fits.items():
        table.add_row(
            what,
            rate_text(what, fit),
            f"{1e6 * fit.fixed:.1f}",
            f"{fit.r_squared:.4f}",
            f"{100 * fit.worst:.1f} %",
            str(fit.points),
        )
    table.add_row("attention call", "", f"{1e6 * cluster.launch_seconds:.1f}", "", "", "")
    console.print(table)
    console.print(f"peak: {cluster.peak_flops / 1e12:.4g} TFLOP/s, {made.peak_source}", highlight=False)
    for line in (*rough(made), *made.unmeasured):
        console.print(line, highlight=False)
