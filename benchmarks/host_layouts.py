"""Host time to build a round's layouts and exchanges for one rank, beside a computing thread.

1,024 samples, 2M tokens, 32 ranks on nodes of 8, plans of `joint` and `dynamic`: at most 20 ms a rank. The other thread
multiplies matrices without pause, as a training rank does while its feed thread prepares the next step.
"""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from raypack.config import load_cluster, load_model
from raypack.layers.frame import build_frame
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.policies import make_plan

RANKS, SAMPLES, TOKENS, TARGET = 32, 1024, 2_000_000, 0.020


def main(quick: bool) -> None:
    topology, model = Topology.regular(RANKS, 8), load_model("1f3s-30b-a3b")
    cluster = load_cluster("h100-8x8", {"rank_tokens_max": 131_072})
    lengths = np.random.default_rng(0).lognormal(6.5, 1.5, SAMPLES)
    samples = Samples.of_lengths(np.clip(lengths * TOKENS / lengths.sum(), 1, 131_072).astype(np.int64))
    table = Table(title=f"Frames of one rank, {SAMPLES} samples, {samples.lengths.sum()} tokens, {RANKS} ranks")
    for column in ("plan", "rounds", "median ms a rank", "slowest rank ms", "target ms"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    stop = threading.Event()
    other = threading.Thread(target=_compute, args=(stop,), daemon=True)
    other.start()
    try:
        for policy in ("dynamic", "joint"):
            plan = make_plan(samples, topology, cluster, model, policy, budget=0 if quick else 50)
            times = []
            for rank in range(0, RANKS, 4 if quick else 1):
                started = time.perf_counter()
                for each in plan.rounds:
                    each.__dict__.pop("columns", None)  # a rank builds them itself
                    build_frame(each, topology, rank, model).segments.positions  # noqa: B018
                times.append(time.perf_counter() - started)
            table.add_row(
                policy,
                str(len(plan.rounds)),
                f"{statistics.median(times) * 1e3:.1f}",
                f"{max(times) * 1e3:.1f}",
                f"{TARGET * 1e3:.0f}",
            )
    finally:
        stop.set()
        other.join(10)
    Console().print(table)


def _compute(stop: threading.Event) -> None:
    a = torch.randn(1024, 1024)
    while not stop.is_set():
        torch.mm(a, a)
