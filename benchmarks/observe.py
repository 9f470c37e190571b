"""What observing costs: steps of two ranks with and without it, in turns, in one run; target under 1 % of a step.

With = marks between layers, the report, the observer actor taking it in, and a scrape of /metrics as often as in
`dashboards/prometheus.yml`.

How a difference of 1 % is seen on a machine that is noisier than that: blocks of a few steps alternate as with,
without, without, with. Four such blocks give one ratio, in which a steady drift cancels; the figure is the median of
these ratios with its 95 % interval. It goes on until the interval is narrower than the target, or time is up, and says
`undecided` where the target lies inside the interval.
`without / without`, of the two blocks in the middle, is what the same method finds where there is nothing to find.

The clock's ratio has the work of the observer in it where all cores are busy. The CPU time of what is done for
observing alone has the least of the machine's noise in it, and is the last row: a report on each rank, what a step adds
to the observer's process, and what that process takes at rest (Ray's threads), which goes by the second and not by the
step.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
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

from benchmarks.paired import interval, verdict
from benchmarks.random_rows import random_rows
from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import ModelConfig, TrainSection
from raypack.layers.costs import model_flops
from raypack.model.stopwatch import Stopwatch
from raypack.observe.observer import start_observer
from raypack.observe.reporter import SEND_SECONDS, Reporter
from raypack.observe.steps import read_steps
from raypack.plan.plan import Placement, Plan, Round, StreamState
from raypack.plan.topology import Block, Topology
from raypack.planning.steps import PlannedStep
from raypack.training.feed import Fed
from raypack.training.parameters import build_optimizer, build_parameters
from raypack.training.reports import Reports
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare

RANKS, BLOCK, TARGET, TIMEOUT = 2, 4, 0.01, 120.0
ORDER = (True, False, False, True)
"""Blocks of a quad, by whether they are observed."""
QUADS_MIN, SECONDS_MAX, SCRAPE_SECONDS = 16, 420.0, 5.0
LENGTHS = (1500, 600, 500, 200)
# As run preset 1f3s_local.
MODEL = ModelConfig(
    name="1f3s-local", layers=4, width=64, heads=8, kv_heads=4, head_dim=16, window=256, experts=8, experts_active=2,
    expert_width=64, shared_expert_width=64, vocabulary=257,
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One step on one rank, seconds: on the clock, of the process's CPU, and the CPU of making and sending a report."""

    wall: float
    cpu: float
    own: float


class Rank:
    """One training rank, as an actor: `block` runs a few steps with observing on or off."""

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
        self.rank, self.reporter, self.recorded = rank, Reporter(observer, interval=SEND_SECONDS), 0
        self.reports = Reports(self.trainer, self.topology, rank, 1e10, "benchmark")

    def block(self, observed: bool) -> list[Timed]:
        """`BLOCK` steps, of which the first is left out: it still hears of the block before."""
        self.trainer.watch = Stopwatch(self.trainer.device) if observed else None
        return [self._step(observed) for _ in range(BLOCK)][1:]

    def _step(self, observed: bool) -> Timed:
        plan = plan_of(self.recorded)
        work = prepare(plan, self.topology, self.rank, MODEL, _rows)
        started, cpu = time.perf_counter(), time.process_time()
        result = train_step(self.trainer, work)
        done, thread = time.perf_counter(), time.thread_time()
        if observed:
            fed = Fed(planned_of(plan), work, None, 0.0, 0.0)
            self.reporter.send(self.reports.make(fed, result, done - started, None))
            self.recorded += 1
        else:
            self.trainer.wire.ledger.take()
        own = time.thread_time() - thread
        return Timed(time.perf_counter() - started, time.process_time() - cpu, own)

    def close(self) -> bool:
        return self.reporter.close(30)


@dataclass
class Found:
    """Steps of rank 0 by quad (four blocks, see `ORDER`); and of each block (observed, CPU of the observer, clock)."""

    quads: list[list[list[Timed]]] = field(default_factory=list)
    observer: list[tuple[bool, float, float]] = field(default_factory=list)

    def ratios(self, of: str, first: tuple[int, ...], second: tuple[int, ...]) -> list[float]:
        """Of each quad: medians of the blocks `first` over those of `second`, geometric mean."""
        found = []
        for quad in self.quads:
            middle = [math.log(statistics.median(getattr(step, of) for step in block)) for block in quad]
            shift = statistics.fmean(middle[i] for i in first) - statistics.fmean(middle[i] for i in second)
            found.append(math.exp(shift))
        return found

    def observing(self, of: str) -> list[float]:
        """With / without."""
        on = tuple(i for i, observed in enumerate(ORDER) if observed)
        return self.ratios(of, on, tuple(i for i in range(len(ORDER)) if i not in on))

    def observer_seconds(self) -> tuple[float, float]:
        """CPU seconds of the observer's process that a step adds, and those a second that it takes without any."""
        # Means: few blocks have a scrape in them.
        rest = statistics.fmean(cpu / clock for observed, cpu, clock in self.observer if not observed)
        added = statistics.fmean(cpu - rest * clock for observed, cpu, clock in self.observer if observed)
        return added / BLOCK, rest

    def steps(self, observed: bool) -> list[Timed]:
        return [step for quad in self.quads for i, block in enumerate(quad) if ORDER[i] == observed for step in block]


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
    return PlannedStep(plan, 0.01, 0.1, 1.01, flops, 0.1, 0.1, sites, sites, {2: 1, 1: 3}, {2: 1, 1: 3})


def _rows(samples: Any, lengths: Any, lows: Any, highs: Any) -> Any:
    return random_rows(lengths, lows, highs, MODEL.vocabulary, seed=0)


def main(quick: bool) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _show(_measure(Path(folder), quick))
    finally:
        ray.shutdown()


def _measure(folder: Path, quick: bool) -> Found:
    observer, url = start_observer(str(folder / "run"), "run", "127.0.0.1", 0, (), TIMEOUT)
    actors = [ray.remote(Rank).options(num_cpus=1).remote(i, str(folder / "store"), observer) for i in range(RANKS)]
    found, deadline = Found(), time.monotonic() + (0 if quick else SECONDS_MAX)
    with _Scraper(url) as scraper:
        _quad(actors, observer, scraper, Found())  # to warm up
        least = 2 if quick else QUADS_MIN
        while len(found.quads) < least or not (_narrow(found) or time.monotonic() > deadline):
            _quad(actors, observer, scraper, found)
    assert all(ray.get([actor.close.remote() for actor in actors], timeout=TIMEOUT))
    ray.get(observer.finish.remote(), timeout=TIMEOUT)
    records = read_steps(folder / "run")
    assert len(records) == (1 + len(found.quads)) * sum(ORDER) * BLOCK
    assert all(record.complete for record in records)
    return found


def _quad(actors: Sequence[Any], observer: Any, scraper: _Scraper, found: Found) -> None:
    blocks = []
    for observed in ORDER:
        scraper.active, before, started = observed, _cpu_seconds(observer), time.perf_counter()
        blocks.append(ray.get([actor.block.remote(observed) for actor in actors], timeout=TIMEOUT)[0])
        found.observer.append((observed, _cpu_seconds(observer) - before, time.perf_counter() - started))
    found.quads.append(blocks)


def _narrow(found: Found) -> bool:
    """By width alone: stopping where the result pleases would make it please."""
    low, high = interval(found.observing("wall"))
    return high - low <= TARGET


def _cpu_seconds(observer: Any) -> float:
    return ray.get(observer.__ray_call__.remote(lambda _: time.process_time()), timeout=TIMEOUT)


class _Scraper:
    """Reads /metrics every `SCRAPE_SECONDS` while `active`: blocks without observing are without scrapes."""

    def __init__(self, url: str) -> None:
        self.active = False
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> _Scraper:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _loop(self) -> None:
        while not self._stop.wait(SCRAPE_SECONDS):
            if self.active:
                with suppress(OSError), urllib.request.urlopen(self._url, timeout=5) as reply:
                    reply.read()


def _show(found: Found) -> None:
    on, off = found.steps(True), found.steps(False)
    table = Table(title=f"Observing steps of {RANKS} ranks: {len(found.quads)} quads, {len(on)} steps each way")
    for column in ("figure", "value", "95 % interval", f"target {1 + TARGET}"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, of in (("clock", "wall"), ("CPU of a rank", "cpu")):
        table.add_row(f"step without, {name}, median ms", f"{1e3 * _median(off, of):.1f}", "", "")
        ratios = found.observing(of)
        low, high = interval(ratios)
        table.add_row("  with / without", *_ratio(ratios), verdict(low, high, 1 + TARGET))
        table.add_row("  without / without", *_ratio(found.ratios(of, (1,), (2,))), "")
    report, record, rest = _median(on, "own"), *found.observer_seconds()
    cost = 1 + (report + record / RANKS) / _median(off, "cpu") + rest / RANKS
    table.add_row("CPU of a report on a rank, median ms", f"{1e3 * report:.3f}", "", "")
    table.add_row("CPU of the observer, for a step, ms", f"{1e3 * record:.3f}", "", "")
    table.add_row("CPU of the observer at rest, ms a second", f"{1e3 * rest:.3f}", "", "")
    table.add_row("  with / without, of the CPU of all ranks", f"{cost:.4f}", "", "")
    Console().print(table)


def _ratio(values: Sequence[float]) -> tuple[str, str]:
    low, high = interval(values)
    return f"{statistics.median(values):.4f}", "too few quads" if math.isinf(high) else f"{low:.4f} to {high:.4f}"


def _median(steps: Sequence[Timed], of: str) -> float:
    return statistics.median(getattr(step, of) for step in steps)
