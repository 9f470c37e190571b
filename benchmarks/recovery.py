"""How long a run stands still: a worker is killed, a node is lost, a resize; on simulated nodes (root, else skipped).

The job of run preset `1f3s_local` with 24,576 tokens a step on 2 nodes of 4 workers. Split: `detect`, until the
controller knows; `restart`, until the new worker group is there; `restore`, until it has trained its first step
(processes connect, the checkpoint is read, the first plan is made, the step itself).
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from raypack.observe.attempts import AttemptEvent, read_attempts
from raypack.observe.record import StepRecord
from raypack.observe.steps import read_steps
from tests.simulated_nodes import SimulatedCluster, why_not

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 300.0
KILL_AT = 3
Disturb = Callable[[SimulatedCluster], None]


@dataclass(frozen=True)
class Figures:
    """Seconds; `repeated` = steps trained twice."""

    detect: float
    restart: float
    restore: float
    repeated: int

    @property
    def total(self) -> float:
        return self.detect + self.restart + self.restore


def main(quick: bool) -> None:
    console = Console()
    reason = why_not()
    if reason:
        console.print(f"skipped: {reason}")
        return
    cases: dict[str, tuple[list[int], Disturb]] = {
        "a worker is killed, 8 ranks again": ([4, 4], _kill_worker),
        "a node is lost, 8 ranks to 4": ([4, 4], lambda cluster: cluster.kill(2)),
        "a node comes, 4 ranks to 8": ([4], _add_node),
    }
    table = Table(title="From the event to the next trained step, seconds (medians)")
    for column in ("event", "detect", "restart", "restore", "in all", "steps repeated"):
        table.add_column(column, justify="left" if column == "event" else "right")
    for name, (nodes, disturb) in cases.items():
        found = [_measured(nodes, disturb) for _ in range(1 if quick else 3)]
        cells = [
            statistics.median(getattr(each, part) for each in found)
            for part in ("detect", "restart", "restore", "total")
        ]
        table.add_row(name, *(f"{cell:.1f}" for cell in cells), str(statistics.median(each.repeated for each in found)))
    console.print(table)


def _measured(nodes: list[int], disturb: Disturb) -> Figures:
    with tempfile.TemporaryDirectory() as name, SimulatedCluster(nodes) as cluster:
        folder = Path(name)
        run_dir = folder / "runs" / "r"
        with open(folder / "console", "wb") as console:
            job = cluster.popen(_command(cluster, folder), stdout=console, stderr=subprocess.STDOUT)
        try:
            _wait(lambda: any(r.step >= KILL_AT for r in _records(run_dir)), folder)
            disturb(cluster)
            happened = time.time()
            _wait(lambda: any(r.attempt == 1 for r in _records(run_dir)), folder)
            return _figures(read_attempts(run_dir), _records(run_dir), happened)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)


def _command(cluster: SimulatedCluster, folder: Path) -> list[str]:
    settings = {
        "run.root": folder / "runs", "run.name": "r", "run.steps": 1000, "topology.workers": 8,
        "topology.workers_min": 4, "topology.nodes": "[]", "topology.resize_seconds": 2,
        "data.tokens_per_step": 24_576, "train.checkpoint_every": 2, "train.eval_every": 0,
    }  # fmt: skip
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    ray = str(Path(sys.executable).with_name("ray"))
    entry = [sys.executable, str(ROOT / "jobs" / "train_1f3s.py"), *flags]
    return [ray, "job", "submit", "--address", f"http://{cluster.head.address}:8265", "--", *entry]


def _figures(events: list[AttemptEvent], records: list[StepRecord], happened: float) -> Figures:
    # A resize begins when the ranks are asked to leave: until then the run has trained.
    known = next(event.time for event in events if event.attempt == 0 and event.event in ("asked", "ended"))
    started = next(event.time for event in events if event.attempt == 1 and event.event == "started")
    trained = min(record.time for record in records if record.attempt == 1)
    return Figures(known - happened, started - known, trained - started, sum(not r.effective for r in records))


def _add_node(cluster: SimulatedCluster) -> None:
    cluster.add(4)


def _kill_worker(cluster: SimulatedCluster) -> None:
    pids = cluster.output(["ip", "netns", "pids", cluster.members[1].namespace]).split()
    workers = [pid for pid in pids if re.search("RayTrainWorker", _command_line(pid))]
    os.kill(int(workers[-1]), signal.SIGKILL)


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _records(run_dir: Path) -> list[StepRecord]:
    return read_steps(run_dir) if (run_dir / "steps.jsonl").exists() else []


def _wait(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError((folder / "console").read_text(errors="replace")[-2000:])
        time.sleep(0.1)
