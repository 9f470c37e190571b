"""`--dry-run`: the checks and the first plan of a run, and nothing of it started or written."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from raypack.checkpoint.state import RunState
from raypack.config import Config
from raypack.config.runfile import load_run
from raypack.data.corpus import Corpus
from raypack.driver.job import main
from raypack.driver.preflight import planned_topology
from raypack.driver.rundir import held
from raypack.plan.plan import StreamState
from raypack.planning.evaluate import evaluate
from raypack.planning.steps import StepPlanner
from tests.job_runs import tiny_corpus, tiny_run

WORLD = {"topology": {"workers": 4, "nodes": [2, 2]}, "plan": {"policy": "joint", "attention": "auto"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_corpus(tmp_path_factory.mktemp("dry") / "corpus")


@pytest.fixture
def file(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tiny_run(tmp_path, corpus, **WORLD)


def dry(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> str:
    assert main(["--run", str(file), "--run.name", "r", "--dry-run", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def planned(config: Config, corpus: Path, step: int, before: StreamState | None):
    planner = StepPlanner(config, Corpus.open(corpus))
    topology = planned_topology(config, planner.cluster, config.topology.workers)
    return planner, planner.plan(topology, step, before or planner.stream.start)


def cells(text: str, first: str) -> list[str]:
    """The cells of the table row that begins with `first`."""
    row = next(line for line in text.splitlines() if line.startswith("│") and line[1:].strip().startswith(first))
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_it_shows_the_first_plan_beside_the_baselines_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], file: Path, corpus: Path
) -> None:
    there = sorted(path for path in file.parent.rglob("*"))
    text = dry(capsys, file)
    assert sorted(path for path in file.parent.rglob("*")) == there
    assert not ray.is_initialized()
    planner, first = planned(load_run([str(file)]), corpus, 0, None)
    figures = evaluate(first.plan, planner.cluster, planner.config.model, itemsize=planner.itemsize)
    inter = f"{figures.bytes_of('inter') / 1e6:,.1f}"
    assert cells(text, "this (joint)")[1:4] == [f"{figures.seconds:.3g}", "1.00", inter]
    assert cells(text, "static")[1] == f"{first.static_step_seconds:.3g}"
    assert cells(text, "dynamic")[1] == f"{first.dynamic_step_seconds:.3g}"
    longest = max(first.plan.placements, key=lambda placement: placement.length)
    assert cells(text, f"{longest.sample} ")[1] == f"{longest.length:,}"
    assert "longest sample, 256 tokens: parent " in text


def test_a_run_that_goes_on_shows_the_step_it_goes_on_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: Path, corpus: Path
) -> None:
    config = load_run([str(file)])
    folder = tmp_path / "runs" / "r" / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    state = RunState.of(config, Corpus.open(corpus).fingerprint, 3, StreamState(0, 0, 20))
    (folder / "state.json").write_text(state.to_json())
    text = dry(capsys, file, "--run.resume", "auto")
    _, third = planned(config, corpus, 3, state.stream)
    assert f"step 3: {len(list(third.plan.placements))} samples, {third.plan.tokens:,} tokens" in text
    assert "resumed from" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--data.max_sample_tokens", "200000"], "data.max_sample_tokens = 200000"),
        (["--run.root", "/dev/null/x"], "cannot write to /dev/null/x/r: Not a directory; choose another run.root"),
        (
            ["--train.checkpoint_root", "/dev/null"],
            "/dev/null/r: Not a directory; choose another train.checkpoint_root",
        ),
        (["--run.steps", "0"], "run.steps = '0'"),
    ],
)
def test_what_a_start_refuses_it_refuses_too(
    capsys: pytest.CaptureFixture[str], file: Path, arguments: list[str], text: str
) -> None:
    assert main(["--run", str(file), "--run.name", "r", "--dry-run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert err.count("\n") == 1


def test_a_directory_that_another_driver_holds_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: Path
) -> None:
    with held(tmp_path / "runs" / "r"):
        assert main(["--run", str(file), "--run.name", "r", "--dry-run"]) == 2
    assert "belongs to a run that goes on" in capsys.readouterr().err
