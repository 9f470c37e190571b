"""`raypack plan` and `raypack evaluate`: tables, JSON, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from raypack.cli import main
from tests.planning_cases import lengths


@pytest.fixture
def step(tmp_path: Path) -> Path:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, lengths(1, 80, 20_000))))
    return file


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output if code == 0 else result.stderr


FIELDS = {
    "policy",
    "seconds",
    "bound_seconds",
    "plain_bound_seconds",
    "plan_seconds",
    "mfu",
    "bytes",
    "rank_tokens_max",
    "rounds",
}


def test_a_plan_written_by_plan_is_read_by_evaluate_with_the_same_figures(step: Path, tmp_path: Path) -> None:
    out, figures = tmp_path / "plan.json", tmp_path / "figures.json"
    table = run("plan", "--lengths", step, "--ranks", 16, "--out", out, "--json", figures)
    assert "seconds / area bound" in table
    planned = json.loads(figures.read_text())
    evaluated = json.loads(run("evaluate", out, "--json", "-"))
    assert planned.keys() >= FIELDS
    assert evaluated.keys() >= FIELDS
    assert planned["plan_seconds"] > 0
    for name in FIELDS - {"plan_seconds"}:
        assert planned[name] == evaluated[name], name
    assert 0 < planned["mfu"] < 1
    assert set(planned["bytes"]["full_in"]) == {"intra", "inter"}
    assert evaluated["ranks"] == 16


def test_json_on_standard_output_is_alone_there(step: Path) -> None:
    assert json.loads(run("plan", "--lengths", step, "--policy", "static", "--json", "-"))["policy"] == "static"


def test_sync_changes_the_figures_of_the_same_plan(step: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    run("plan", "--lengths", step, "--ranks", 8, "--policy", "dynamic", "--out", out)
    seconds = {s: json.loads(run("evaluate", out, "--sync", s, "--json", "-"))["seconds"] for s in ("step", "layer")}
    assert seconds["layer"] >= seconds["step"]


def test_a_foreign_plan_in_short_form_is_costed(tmp_path: Path) -> None:
    file = tmp_path / "foreign.json"
    placement = {"sample": 0, "length": 4096, "parent": [0, 16], "child": [0, 8]}
    file.write_text(json.dumps({"ranks": 32, "ranks_per_node": 8, "rounds": [[placement]]}))
    found = json.loads(run("evaluate", file, "--json", "-"))
    assert (found["policy"], found["ranks"], found["rounds"]) == ("given", 32, 1)
    assert found["bytes"]["full_in"]["inter"] > 0
    assert found["bytes"]["sparse_in"]["inter"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", 65], "ranks = 65: cluster h100-8x8 has 64"),
        (["--ranks", 0], "ranks = 0"),
        (["--cluster", "dgx"], "no cluster preset 'dgx': there are"),
        (["--model", "gpt"], "no model preset 'gpt': there are"),
        (["--cap", 0], "rank_tokens_max"),
        (["--cap", 100, "--ranks", 4], "fits no block of 4 ranks at the cap of 100"),
        (["--budget", -1], "budget = -1"),
    ],
)
def test_bad_requests_get_one_line(step: Path, arguments: list, words: str) -> None:
    error = run("plan", "--lengths", step, *arguments, code=2)
    assert words in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["0\n5\n", "-4\n", "1.5\n", "", "ten\n"])
def test_bad_length_files_get_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_text(text)
    assert len(run("plan", "--lengths", file, code=2).strip().splitlines()) == 1


def test_length_files_of_every_kind_give_the_same_plan(tmp_path: Path) -> None:
    n = lengths(2, 20)
    np.save(tmp_path / "a.npy", n)
    np.savez(tmp_path / "a.npz", lengths=n)
    (tmp_path / "a.txt").write_text("\n".join(map(str, n)))
    plans = []
    for kind in ("npy", "npz", "txt"):
        out = tmp_path / f"{kind}.json"
        run("plan", "--lengths", tmp_path / f"a.{kind}", "--ranks", 4, "--budget", 0, "--out", out)
        plans.append(out.read_text())
    assert len(set(plans)) == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ranks": 4, "rounds": [[]], "colour": 1}'])
def test_broken_plans_get_one_line_and_nothing_is_written(tmp_path: Path, text: str) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "out.json"
    file.write_text(text)
    assert len(run("evaluate", file, "--json", out, code=2).strip().splitlines()) == 1
    assert not out.exists()


def test_the_schedule_of_hsap_is_readable_from_plan_and_from_evaluate(tmp_path: Path) -> None:
    file, out = tmp_path / "lengths.txt", tmp_path / "plan.json"
    file.write_text("131000\n900\n")
    options = ("--lengths", file, "--ranks", 16, "--attention", "hsap", "--schedule", "--out", out)
    planned = run("plan", *options)
    assert "round 0, ranks [0, 16]: 2 nodes of 8" in planned
    assert "sample 0: [0, 92633) node 0, [92633, 131000) node 1" in planned
    assert "node 0 -> node 1: 8,192 tokens: sample 0 [0, 8192); then attends 38367 x 8192" in planned
    shown = CliRunner().invoke(main, ["evaluate", str(out), "--schedule", "--json", "-"])
    assert json.loads(shown.stdout)["policy"] == "joint"
    assert "ranks [0, 16]" in shown.stderr
    plain = run("plan", "--lengths", file, "--ranks", 8, "--schedule")
    assert "no sample is spread over nodes" in plain


def test_strategies_are_listed_beside_dynamic(step: Path) -> None:
    shown = run("plan", "--lengths", step, "--ranks", 16, "--policy", "dynamic", "--strategies")
    assert "pool of strategies" in shown
    assert "best for this step" in shown
    found = json.loads(run("plan", "--lengths", step, "--ranks", 16, "--strategies", "--budget", 0, "--json", "-"))
    pool = found["strategies"]["pool"]
    assert 0 <= found["strategies"]["chosen"] < len(pool)
    assert all(sum(each["widths"]) <= 16 for each in pool)
    assert found["strategies"]["dynamic_seconds"] >= found["bound_seconds"]


def test_a_budget_in_seconds_marks_the_plan_as_not_reproducible(step: Path) -> None:
    found = json.loads(run("plan", "--lengths", step, "--ranks", 8, "--budget-seconds", 0.05, "--json", "-"))
    assert found["policy"] == "joint (timed, not reproducible)"
    assert "budget-seconds = 0.0" in run("plan", "--lengths", step, "--budget-seconds", 0, code=2)
