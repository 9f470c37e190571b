"""The last lines of a run: figures that are modelled and named so, and a command that goes on where it ended."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from raypack.checkpoint.state import RunState
from raypack.checkpoint.storage import STATE_FILE, folder_name
from raypack.config import Config
from raypack.config.runfile import load_run
from raypack.driver.last_lines import NAME, last_lines, typed_before
from raypack.driver.rundir import resolve_run, write_config
from raypack.files import JOB_MARK
from raypack.observe.summary import Summary, summarise
from raypack.plan.plan import StreamState
from tests.observe_cases import record

TYPED = [".venv/bin/python", "jobs/train_1f3s.py"]
PLANS = {"plan_step_seconds": 2.0, "dynamic_step_seconds": 3.0, "static_step_seconds": 5.0}
SENT = {"bytes_static": {"full_in": {"intra": 0, "inter": 7_000_000}}}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run in the current directory, with its settings."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "runs" / "mine"
    made.mkdir(parents=True)
    write_config(made, config(), tmp_path / "corpus")
    return made


def config() -> Config:
    return Config.model_validate({"run": {"name": "mine", "steps": 40}, "train": {"checkpoint_every": 10}})


def checkpoint(run_dir: Path, step: int) -> Path:
    made = run_dir / "checkpoints" / folder_name(step)
    made.mkdir(parents=True)
    (made / STATE_FILE).write_text(RunState(step, StreamState(0, 0, 0), "model", "corpus").to_json())
    return made


def said(run_dir: Path, summary: Summary | None, page: str = "") -> dict[str, str]:
    """The named lines; "" = what comes before them."""
    lines = [line.text for line in last_lines(config(), run_dir, summary, page, TYPED)]
    return {"": lines[0], **{line[:NAME].strip(): line[NAME:] for line in lines}}


def summary(reason: str, **changes: object) -> Summary:
    records = [record(step, loss=5.5 - step, **PLANS, **SENT) for step in range(3)]
    return summarise([r.model_copy(update=changes) for r in records], "mine", reason)


def test_a_finished_run_says_what_came_of_it_and_what_its_plans_were_worth(run_dir: Path) -> None:
    checkpoint(run_dir, 40)
    lines = said(run_dir, summary("finished"), "runs/mine/page.html")
    assert lines[""].startswith("run mine finished: 3 steps on 2 ranks, loss 5.5000 -> 3.5000")
    assert lines["modelled"].startswith("this plan 6.00 s, 0.0 MB between nodes; dynamic 9.00 s (1.50x), ")
    assert "static 15.00 s (2.50x), 21.0 MB between nodes" in lines["modelled"]
    assert lines["modelled"].endswith("(same samples; cost model of cluster local-2x4)")
    assert lines["page"] == "runs/mine/page.html"
    assert "data build" in lines["next"]
    assert "modelled" not in said(run_dir, summary("finished", static_step_seconds=None))


@pytest.mark.parametrize(("reason", "steps"), [("finished", 80), ("interrupted", 40), ("failed: a rank died", 40)])
def test_the_command_goes_on_from_the_checkpoint_that_is_named(run_dir: Path, reason: str, steps: int) -> None:
    for step in (10, 20):
        checkpoint(run_dir, step)
    lines = said(run_dir, summary(reason))
    assert lines["checkpoint"] == "runs/mine/checkpoints/step-00000020"
    words = shlex.split(lines["go on"])
    assert words[:2] == TYPED
    typed = load_run(words[2:])
    assert typed.run.steps == steps
    assert resolve_run(typed) == (run_dir, str(Path.cwd() / lines["checkpoint"]))
    assert typed.train == config().train
    assert ("next" in lines) == (reason == "finished")


def test_without_a_checkpoint_there_is_no_command_and_without_a_summary_there_are_no_figures(run_dir: Path) -> None:
    lines = said(run_dir, summary("interrupted"))
    assert "after every 10 steps" in lines["checkpoint"]
    assert "go on" not in lines
    checkpoint(run_dir, 10)
    lines = said(run_dir, None)
    assert "go on" in lines
    assert "modelled" not in lines


def test_a_submitted_job_goes_on_as_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_MARK, "1")
    checkpoint(run_dir, 10)
    assert said(run_dir, None)["go on"].startswith("ray job submit -- .venv/bin/python jobs/train_1f3s.py --run ")


def test_what_was_typed_is_known_up_to_the_jobs_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["--run.steps", "3"]
    monkeypatch.setattr(sys, "orig_argv", [*TYPED, *own])
    assert typed_before(own) == TYPED
    monkeypatch.setattr(sys, "orig_argv", TYPED)
    assert typed_before([]) == TYPED
    monkeypatch.setattr(sys, "argv", ["script.py", "--other"])
    assert typed_before(own) == [sys.executable, "script.py"]
