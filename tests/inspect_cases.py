"""A run directory as an observer leaves it: two attempts, a skipped step, several widths. Shared by inspect's tests."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import tomli_w

from raypack.config import Config, build
from raypack.observe.attempts import AttemptLog
from raypack.observe.observer import RunObserver
from raypack.observe.record import RankReport
from tests.observe_cases import FACTS

WORLDS = (8, 4)
CONFIG = build(
    Config,
    {
        "run": {"steps": 60, "name": "two-attempts"},
        "topology": {"workers": 8, "nodes": [4, 4]},
        "model": {"layers": 4, "width": 64, "heads": 8, "kv_heads": 4, "window": 256, "vocabulary": 257},
    },
)


def write_run(run_dir: Path, steps: int = 40, finish: str = "finished", loss: float = 5.0) -> RunObserver:
    """Steps 0..steps-1 of attempt 0 on 8 ranks, then from 10 steps before its end on 4. Open where `finish` is ""."""
    observer = RunObserver(str(run_dir), run_dir.name, notes=("nodes are simulated",))
    (run_dir / "config.toml").write_text(tomli_w.dumps(CONFIG.model_dump()))
    clock = iter(range(10**9))
    observer._started, observer._collector._clock = 1.7e9, lambda: 1.7e9 + 30.0 * next(clock)
    for attempt, world in enumerate(WORLDS):
        observer.begin(attempt, world)
        AttemptLog(run_dir).add("started", attempt, world=world)
        first, end = (0, steps) if attempt == 0 else (steps - 10, steps + 20)
        for step in range(first, end):
            for rank in range(world):
                observer.report(_report(rank, step, attempt, world, loss))
        AttemptLog(run_dir).add("ended", attempt, reason="rank 3 died" if attempt == 0 else "finished")
    if finish:
        observer.finish(finish)
    return observer


def _report(rank: int, step: int, attempt: int, world: int, loss: float) -> RankReport:
    busy = 1.0 + 0.1 * math.sin(step + rank) + (0.8 if rank == 3 and step > 25 else 0.0)
    seconds = 2.0 + 0.2 * math.sin(step / 3)
    wide = world if step % 3 == 0 else world // 2
    inter = 4_000_000 if step % 3 == 0 else 500_000
    return RankReport(
        rank=rank,
        node=rank // 4,
        world=world,
        attempt=attempt,
        step=step,
        tokens=3000 + 40 * rank,
        seconds=seconds,
        busy_seconds=busy,
        wait_seconds=seconds - busy,
        plan_wait_seconds=0.001 * (1 + step % 4),
        exchanged={("full_in", "inter"): inter, ("full_out", "inter"): inter // 2, ("sparse_in", "intra"): 2_000_000},
        collected={("gradient_reduce", "inter"): 1_000_000},
        phases={"plan_wait": 0.002, "forward": 0.5, "backward": 0.9, "gradient_reduce": 0.2, "optimizer": 0.05},
        checkpoint_seconds=0.4 if step % 10 == 9 else None,
        layers={("full", "forward"): 0.3, ("full", "backward"): 0.6, ("sparse", "forward"): 0.25,
                ("sparse", "backward"): 0.4, ("head", "forward"): 0.05, ("head", "backward"): 0.1},
        exchange_seconds={"full_in": 0.1, "full_out": 0.05, "sparse_in": 0.02},
        memory_bytes=500_000_000,
        facts=replace(
            FACTS,
            first_sample=12 * step,
            sample_count=12,
            tokens=24_000,
            labels=23_988,
            loss=loss * math.exp(-step / 60) if step != 20 else float("nan"),
            applied=step != 20,
            heldout_loss=loss * math.exp(-step / 70) if step % 20 == 19 else None,
            sample_ids_digest=f"{step:04d}",
            model_flops=5e9,
            plan_seconds=0.05,
            plan_step_seconds=0.1,
            static_step_seconds=0.13,
            dynamic_step_seconds=0.11 + 0.01 * (step % 2),
            plan_bound_ratio=1.02 + 0.01 * (step % 5),
            bytes_static={"full_in": {"intra": 0, "inter": 30_000_000}, "sparse_in": {"intra": 0, "inter": 9_000_000}},
            bytes_dynamic={"full_in": {"intra": 9_000_000, "inter": 12_000_000}},
            parent_widths={wide: 1, 1: 11},
            child_widths={4: 1, 2: 3, 1: 8},
            expert_load=1.5,
        ) if rank == 0 else None,
    )  # fmt: skip
