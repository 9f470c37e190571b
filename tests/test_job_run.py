"""The job from end to end: what a person sees who clones the repository and starts it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from raypack.checkpoint.addresses import open_store
from raypack.checkpoint.state import RunState, newest
from raypack.checkpoint.storage import FOLDER
from raypack.config.runfile import load_run
from raypack.driver.job import main
from raypack.observe.steps import read_steps
from raypack.observe.summary import read_summary
from raypack.plan.plan import Placement
from raypack.plan.plan_file import plan_from_json
from raypack.report.view import LEGEND
from tests.job_runs import start_job

pytestmark = pytest.mark.ray

STEPS, WORKERS = 12, 4
FLAGS = {"--run.steps": STEPS, "--plan.keep": "true", "--train.eval_every": 6}

PHASES = [
    "torch and Ray", "corpus", "checks", "Ray", "cluster checks", "observer", "planner", "workers", "process group",
    "places", "groups", "model", "held-out plan", "peak", "first plan",
]  # fmt: skip
LAST_LINES = ["modelled", "checkpoint", "go on", "page", "all figures", "next"]


def test_the_default_job_learns_with_parents_and_children(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "runs" / "whole"
    flags = [str(part) for flag in FLAGS.items() for part in flag]
    with start_job(tmp_path, "--run.root", str(tmp_path / "runs"), "--run.name", "whole", *flags) as job:
        job.wait_until(lambda: "step 2 " in job.out, "step 2")
        endpoint = json.loads((run_dir / "metrics.json").read_text())
        with urllib.request.urlopen(endpoint["url"], timeout=20) as reply:
            metrics = reply.read().decode()
        assert job.wait() == 0, job.out + job.err
        assert job.wait_for_family_to_end() == []
        assert job.err == ""
        # Nothing but the run's own lines: no log of Ray between them.
        lines = [line for line in job.out.splitlines() if not line.startswith(("run whole finished", "step ", LEGEND))]
        assert [line.split("  ")[0] for line in lines] == PHASES + LAST_LINES

    for name in ("raypack_loss", "raypack_tokens_total", "raypack_step_seconds_count", "raypack_world_size"):
        assert f'{name}{{run="whole"}}' in metrics
    assert 'raypack_all_to_all_bytes_total{run="whole",scope="inter",site="full_in"}' in metrics

    records = read_steps(run_dir)
    assert [r.step for r in records] == list(range(STEPS))
    assert all(r.complete and r.applied and r.effective and r.world == WORKERS and r.attempt == 0 for r in records)
    losses = [r.loss for r in records]
    assert None not in losses
    assert fmean(losses[-3:]) < fmean(losses[:3]) - 0.5  # type: ignore[arg-type]
    assert all(a.first_sample + a.sample_count == b.first_sample for a, b in pairwise(records))
    assert all(r.tokens == sum(t or 0 for t in r.rank_tokens) for r in records)
    assert all(0 < r.labels < r.tokens and (r.mfu or 0) > 0 and (r.plan_bound_ratio or 0) >= 1 - 1e-9 for r in records)
    held_out = {r.step: r.heldout_loss for r in records if r.heldout_loss is not None}
    assert list(held_out) == [5, 11]
    assert held_out[11] < held_out[5]

    summary = read_summary(run_dir)
    assert summary is not None
    assert (summary.stop_reason, summary.steps, summary.worlds) == ("finished", STEPS, [WORKERS])
    assert summary.bytes["full_in"]["inter"] > 0
    assert "nodes are simulated" in " ".join(summary.notes)
    assert len(summary.parent_widths) > 1
    assert len(summary.child_widths) > 1

    plans = [plan_from_json(file.read_text()) for file in sorted((run_dir / "plans").iterdir())]
    assert [p.step for p in plans] == list(range(STEPS))
    assert any(p.parent != p.child for plan in plans for p in plan.placements)
    assert [p.tokens for p in plans] == [r.tokens for r in records]

    checkpoint, _ = newest(open_store(run_dir / FOLDER))
    assert checkpoint is not None
    assert RunState.read(checkpoint).stream == plans[-1].after

    file = run_dir / "config.toml"
    assert load_run(["--run", str(file)]).train.eval_every == FLAGS["--train.eval_every"]
    assert main(["--run", str(file)]) == 2  # the same run once more
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_with_hsap_trains_as_with_ulysses_and_sends_less_across_nodes(tmp_path: Path) -> None:
    records = {}
    for attention in ("ulysses", "hsap"):
        flags = [
            str(part) for flag in (FLAGS | {"--run.steps": 3, "--plan.attention": attention}).items() for part in flag
        ]
        with start_job(tmp_path, "--run.root", str(tmp_path / "runs"), "--run.name", attention, *flags) as job:
            assert job.wait() == 0, job.out + job.err
        records[attention] = read_steps(tmp_path / "runs" / attention)
    for ulysses, hsap in zip(*records.values(), strict=True):
        assert ulysses.loss == pytest.approx(hsap.loss, rel=1e-3)  # float32: a token at the edge changes its expert
    sent = {name: sum(scopes["inter"] for r in each for scopes in r.bytes.values()) for name, each in records.items()}
    assert 0 < sent["hsap"] < sent["ulysses"]
    placements = [p for file in (tmp_path / "runs" / "hsap" / "plans").iterdir() for p in _placements(file)]
    assert any(p.attention == "hsap" for p in placements)


def _placements(file: Path) -> Sequence[Placement]:
    return plan_from_json(file.read_text()).placements
