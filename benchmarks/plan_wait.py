"""How long workers stand still for their plans in a steady state: the default job through Ray.

Each step counts with its slowest rank. The planner actor shares the machine's cores with the workers here, at the
lowest priority. Apart from it: the agreement before each step (comparing digests, and waiting for the latest rank; mean
of the ranks), and the time a rank takes to digest a plan, which happens beside the step before.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from raypack.observe.record import StepRecord
from raypack.observe.steps import read_steps
from raypack.plan.plan_file import plan_from_json

JOB = Path(__file__).resolve().parent.parent / "jobs" / "train_1f3s.py"
# The first steps have nothing planned ahead yet.
UNSTEADY = 4
MEDIAN_TARGET, P95_TARGET = 1e-3, 20e-3


def run(root: Path, steps: int) -> Path:
    """Train the default model; the run's directory."""
    flags = ["--run.root", str(root), "--run.name", "wait", "--run.steps", str(steps), "--plan.keep", "true",
             "--train.eval_every", "0"]  # fmt: skip
    done = subprocess.run([sys.executable, str(JOB), *flags], capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"the job ended with {done.returncode}")
    return root / "wait"


def digest_seconds(run_dir: Path) -> list[float]:
    """Seconds to digest each plan of the run, as every rank does."""
    seconds = []
    for file in sorted((run_dir / "plans").iterdir()):
        plan = plan_from_json(file.read_text(encoding="utf-8"))
        started = time.perf_counter()
        plan.digest  # noqa: B018 - computed on first use
        seconds.append(time.perf_counter() - started)
    return seconds


def table(records: Sequence[StepRecord], digests: Sequence[float]) -> Table:
    rows = {
        "wait for the plan": [r.plan_wait_seconds for r in records],
        "agreement, waiting for the latest rank included, mean": [r.phase_seconds["agree"] for r in records],
        "digest of a plan, beside the step before": digests,
        "making a plan, in the planner": [r.plan_seconds for r in records],
        "step": [r.seconds for r in records],
    }
    made = Table(title=f"{len(records)} steps after the first {UNSTEADY}, {records[0].world} workers, slowest rank, ms")
    for name in ("", "median", "p95", "largest", "target"):
        made.add_column(name, justify="left" if not name else "right")
    for name, seconds in rows.items():
        figures = (statistics.median(seconds), float(np.quantile(seconds, 0.95)), max(seconds))
        target = f"median {MEDIAN_TARGET * 1e3:g}, p95 {P95_TARGET * 1e3:g}" if name == "wait for the plan" else ""
        made.add_row(name, *(f"{figure * 1e3:,.2f}" for figure in figures), target)
    return made


def main(quick: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="raypack-plan-wait-") as folder:
        run_dir = run(Path(folder), UNSTEADY + (6 if quick else 30))
        records = [r for r in read_steps(run_dir) if r.step >= UNSTEADY]
        Console().print(table(records, digest_seconds(run_dir)))


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
