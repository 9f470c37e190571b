"""Elastic runs on simulated nodes: submitted as a person would, watched through the files they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from raypack.config import Config
from raypack.config.runfile import load_run
from raypack.observe.attempts import AttemptEvent, read_attempts
from raypack.observe.record import StepRecord
from raypack.observe.steps import read_steps
from tests.job_runs import script_before_step, tiny_corpus, tiny_run
from tests.machine import scaled
from tests.simulated_nodes import SimulatedCluster

LIMIT = 240.0
# No experts: other worlds round otherwise, and in float32 a token at the edge may go to another expert.
DENSE: dict[str, dict[str, Any]] = {
    "model": {"pattern": "FSL", "layers": 3, "experts": 0, "ffn_width": 32, "linear_chunk": 16},
    "data": {"max_sample_tokens": 256, "tokens_per_step": 768, "holdout_tokens": 0},
    "plan": {"rank_tokens_max": 256},
    "topology": {"nodes": [], "resize_seconds": 3.0},
    "timeouts": {"start": scaled(60.0), "collective": scaled(60.0)},
}  # fmt: skip

# A train loop that takes its time where something is about to happen.
PACED = """
here = work.plan.step if work is not None else -1
time.sleep(max((t for s, w, t in {holds!r} if here >= s and dist.get_world_size() == w), default=0.02))
"""


class ElasticRun:
    """A run submitted with `ray job submit` to the head of a simulated cluster; a context manager.

    Args:
        holds: (step, world, seconds): from that step on a world of that size takes so long a step.
    """

    def __init__(
        self, cluster: SimulatedCluster, folder: Path, holds: Sequence[tuple[int, int, float]], **sections: Any
    ) -> None:
        self._cluster, self._folder = cluster, folder
        self.run_dir = folder / "runs" / "r"
        script = script_before_step(folder / "paced.py", PACED.format(holds=list(holds)))
        merged = {name: {**DENSE.get(name, {}), **sections.get(name, {})} for name in {**DENSE, **sections}}
        self.corpus = tiny_corpus(folder / "corpus", documents=400)
        self._file = tiny_run(folder, self.corpus, **merged)
        ray = str(Path(sys.executable).with_name("ray"))
        url = f"http://{cluster.head.address}:8265"
        entry = [sys.executable, str(script), "--run", str(self._file), "--run.name", "r"]
        with open(folder / "console", "wb") as console:
            self._job = cluster.popen(
                [ray, "job", "submit", "--address", url, "--", *entry], stdout=console, stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", "RAYPACK_HOME": str(folder / "home")},
            )  # fmt: skip

    @property
    def config(self) -> Config:
        return load_run([str(self._file)])

    @property
    def console(self) -> str:
        return (self._folder / "console").read_text(errors="replace")

    def records(self) -> list[StepRecord]:
        """As far as they are written; none before the run begins."""
        return read_steps(self.run_dir) if (self.run_dir / "steps.jsonl").exists() else []

    def events(self) -> list[AttemptEvent]:
        return read_attempts(self.run_dir)

    def reached(self, step: int, world: int) -> Callable[[], bool]:
        """Whether a world of that size has trained that step, or a later one."""
        return lambda: any(r.step >= step and r.world == world for r in self.records())

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = LIMIT) -> None:
        timeout = scaled(timeout)
        deadline = time.monotonic() + timeout
        while not condition():
            assert self._job.poll() is None, f"the job ended before {what}:\n{self.console[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} in {timeout:g} s:\n{self.console[-3000:]}"
            time.sleep(0.25)  # each look reads all records

    def wait(self, timeout: float = LIMIT) -> int:
        return self._job.wait(scaled(timeout))

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._job.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._job.pid, signal.SIGKILL)
            self._job.wait(10)
