"""A run with parts of one's own: started from the folder where they lie, found in every process that needs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from raypack.cli import main
from raypack.observe.steps import read_steps
from tests.job_runs import ROOT, Started, job_environment, tiny_corpus, tiny_run

PARTS = """
import os
from pathlib import Path

from examples.kernel import by_document
from examples.policy import soonest
from examples.sink import Csv

FOLDER = Path(__file__).parent


def policy(problem):
    seen("policy")
    return soonest(problem)


def kernel(*given):
    seen("kernel")
    return by_document(*given)


class Sink(Csv):
    def update(self, record, replayed):
        seen("sink")
        super().update(record, replayed)


def seen(part):
    (FOLDER / f"{part}-{os.getpid()}").touch()
"""
GATED = ("--model.own_layers", "G=gated_linear.kind:GATED")
OWN = {"plan": {"policy": "own_parts:policy"}, "train": {"kernel": "own_parts:kernel"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_parts.py").write_text(PARTS)
    tiny_run(tmp_path, tiny_corpus(tmp_path / "corpus"), **OWN, observe={"sinks": ["own_parts:Sink"]})
    return tmp_path


@pytest.mark.ray
@pytest.mark.rest
def test_layer_kind_policy_kernel_and_sink_are_found_where_the_run_is_started(folder: Path) -> None:
    asked = ["tiny.toml", "--run.name", "r", "--run.steps", "3", "--model.pattern", "GF", *GATED]
    code = f"import raypack; print(raypack.train({asked!r}))"
    env = job_environment(folder / "home", PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "examples")]))
    with Started([sys.executable, "-c", code], folder / "console", env, cwd=folder) as job:
        assert job.wait() == 0, job.out + job.err
    assert job.out.splitlines()[-1] == str(folder / "runs" / "r")
    records = read_steps(folder / "runs" / "r")
    assert [(r.step, r.policy, r.parent_widths == r.child_widths) for r in records] == [
        (step, "own_parts:policy", True) for step in range(3)
    ]
    assert {"other", "full"} <= set(records[-1].layer_seconds)
    rows = (folder / "runs" / "r" / "steps.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["step", "0", "1", "2"]
    processes = {part: {p.name.rpartition("-")[2] for p in folder.glob(f"{part}-*")} for part in ("kernel", "sink")}
    assert len(processes["kernel"]) == 2, "both workers"
    assert not processes["kernel"] & processes["sink"]
    assert len(list(folder.glob("policy-*"))) > 1, "the driver's check and the planner"


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--model.own_layers", "G=own_parts:policy", "must be a LayerKind"),
        ("--plan.policy", "own_part:policy", "there is no module own_part here"),
        ("--plan.policy", "own_parts:polcy", "did you mean policy?"),
        ("--train.kernel", "own_parts:FOLDER", "train.kernel = 'own_parts:FOLDER': must be a callable"),
        ("--observe.sinks", "own_parts:kernel", "must be a class with update and close"),
    ],
)
def test_a_name_that_leads_nowhere_ends_a_run_before_it_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flag: str, value: str, text: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    done = CliRunner().invoke(main, ["train", "tiny.toml", flag, value])
    assert done.exit_code == 2, done.output
    assert text in done.stderr
    assert done.stderr.startswith("error: ")
    assert not (folder / "runs").exists()
