"""What observing costs: steps of two ranks with and without it, in turns, in one run; target under 1 % of a step.

With = marks between layers, the report, the observer actor taking it in, and a scrape of /metrics every second. On a
machine whose cores are all busy, the actor's work is in the clock's ratio too. `own CPU time` is what a rank's thread
spends in making and sending a report: the figure with the least of the machine's noise in it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from raypack.config import ModelConfig, TrainSection
from raypack.model.stopwatch import Stopwatch
from raypack.observe.observer import start_observer
from raypack.observe.reporter import Reporter
from raypack.observe.steps import read_steps
from raypack.parallel.groups import Groups
from raypack.parallel.ledger import Ledger
from raypack.parallel.topology import Block, Topology
from raypack.parallel.wire import Wire
from raypack.planning.flops import model_flops
from raypack.planning.plan import Placement, Plan, Round, StreamState
from raypack.planning.planner import PlannedStep
from raypack.training.feed import Fed
from raypack.training.optimizer import build_optimizer
from raypack.training.parameters import build_parameters
from raypack.training.report import Reports
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare

RANKS, BLOCK, TARGET, TIMEOUT = 2, 4, 0.01, 120.0
LENGTHS = (1500, 600, 500, 200)
# As jobs/1f3s_local.toml.
MODEL = ModelConfig(
    name="1f3s-local", layers=4, width=64, heads=8, kv_heads=4, head_dim=16, window=256, experts=8, experts_active=2,
    expert_width=64, shared_expert_width=64, vocabulary=257,
)  # fmt: skip


@dataclass
class Found:
    """Seconds of steps by whether they were observed: on the clock, of the rank's CPU; `own` = CPU of making and
    sending reports."""

    wall: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    cpu: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    own: list[float] = field(default_factory=list)

    def ratios(self, which: dict[bool, list[float]]) -> list[float]:
        """With / without, of neighbouring blocks."""
        size = BLOCK - 1
        return [
            statistics.median(which[True][i : i + size]) / statistics.median(which[False][i : i + size])
            for i in range(0, len(which[True]), size)
        ]


class Rank:
    """One training rank, as an actor: `run` steps with observing switched on and off in blocks."""

    def __init__(self, rank: int, store: str, observer: Any) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
        )
        self.topology, device = Topology((1,) * RANKS), torch.device("cpu")
        groups = Groups(self.topology, device, TIMEOUT)
        train = TrainSection()
        parameters = build_parameters(MODEL, train, 0, groups, device)
        self.trainer = Trainer(
            parameters, build_optimizer(parameters.masters, train), train, 10**6,
            Wire(groups, Ledger(self.topology, rank)), groups, device,
        )  # fmt: skip
        self.rank, self.reporter = rank, Reporter(observer)
        self.reports = Reports(self.trainer, self.topology, rank, 1e10, "benchmark")

    def run(self, blocks: int) -> Found:
        """The first step of a block is left out: it still hears of the block before."""
        found = Found()
        number = 0
        for block in range(2 * blocks):
            observed = block % 2 == 0
            self.trainer.watch = Stopwatch(self.trainer.device) if observed else None
            for i in range(BLOCK):
                plan = plan_of(number)
                work = prepare(plan, self.topology, self.rank, MODEL, _rows)
                started, cpu = time.perf_counter(), time.process_time()
                result = train_step(self.trainer, work)
                done, thread = time.perf_counter(), time.thread_time()
                if observed:
                    fed = Fed(planned_of(plan), work, None, 0.0, 0.0)
                    self.reporter.send(self.reports.make(fed, result, done - started, None))
                    number += 1
                else:
                    self.trainer.wire.ledger.take()
                ended, own = time.perf_counter(), time.thread_time() - thread
                if i:
                    found.wall[observed].append(ended - started)
                    found.cpu[observed].append(time.process_time() - cpu)
                    found.own += [own] if observed else []
        self.reporter.close(30)
        return found


def plan_of(step: int) -> Plan:
    """The longest over both ranks, the others at home."""
    wide = Block(0, RANKS)
    first = Placement(0, LENGTHS[0], wide, wide, LENGTHS[0] - 1)
    homes = [Placement(1 + i, n, Block(i % RANKS, 1), Block(i % RANKS, 1), n - 1) for i, n in enumerate(LENGTHS[1:])]
    return Plan((1,) * RANKS, (Round((first, *homes)),)).at(step, _state(step), _state(step + 1))


def _state(step: int) -> StreamState:
    return StreamState(0, 0, step * len(LENGTHS))


def planned_of(plan: Plan) -> PlannedStep:
    sites = {site: {"intra": 0, "inter": 1_000_000} for site in ("full_in", "full_out", "sparse_in", "sparse_out")}
    flops = model_flops(MODEL, list(LENGTHS))
    return PlannedStep(plan, 0.01, 0.1, 1.01, flops, sites, sites, {2: 1, 1: 3}, {2: 1, 1: 3})


def _rows(samples: Any, lengths: Any, lows: Any, highs: Any) -> Any:
    count = int(sum(highs - lows))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL.vocabulary, (count,), generator=generator).numpy()
    return tokens, tokens


def main(quick: bool) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _measure(Path(folder), blocks=3 if quick else 16)
    finally:
        ray.shutdown()


def _measure(folder: Path, blocks: int) -> None:
    observer, url = start_observer(str(folder / "run"), "run", "127.0.0.1", 0, (), TIMEOUT)
    actors = [ray.remote(Rank).options(num_cpus=1).remote(i, str(folder / "store"), observer) for i in range(RANKS)]
    stop = threading.Event()
    scraper = threading.Thread(target=_scrape, args=(url, stop), daemon=True)
    scraper.start()
    found = ray.get([actor.run.remote(blocks) for actor in actors], timeout=1200)
    stop.set()
    scraper.join(10)
    ray.get(observer.finish.remote(), timeout=TIMEOUT)
    records = read_steps(folder / "run")
    assert len(records) == blocks * BLOCK
    assert all(record.complete for record in records)
    _show(found[0], len(records))


def _scrape(url: str, stop: threading.Event) -> None:
    while not stop.wait(1.0):
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            reply.read()


def _show(found: Found, records: int) -> None:
    count, own = len(found.own), statistics.median(found.own)
    table = Table(title=f"Observing steps of {RANKS} ranks: {count} each way, {records} records, all complete")
    for column in ("figure", "value", "target"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, which in (("clock", found.wall), ("CPU of a rank", found.cpu)):
        bare, ratios = statistics.median(which[False]), found.ratios(which)
        table.add_row(f"step without, {name}, median ms", f"{bare * 1e3:.1f}", "")
        table.add_row("  with / without, median of blocks", f"{statistics.median(ratios):.4f}", f"{1 + TARGET}")
        table.add_row("  the blocks' own spread", f"{min(ratios):.3f} to {max(ratios):.3f}", "")
    table.add_row("own CPU time of a report, median ms", f"{own * 1e3:.3f}", "")
    table.add_row("  share of the CPU time of a step", f"{own / statistics.median(found.cpu[False]):.4f}", f"{TARGET}")
    Console().print(table)
