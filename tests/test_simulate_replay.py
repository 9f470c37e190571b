"""`raypack simulate`: the table's figures are those of the plans, and bad requests get one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from raypack.cli import main
from raypack.config import load_cluster, load_model, preset_names
from raypack.errors import RaypackError
from raypack.plan.names import POLICIES
from raypack.plan.topology import Topology
from raypack.planning.evaluate import evaluate
from raypack.simulate.replay import Replay, replay
from raypack.simulate.summary import summarise, to_data
from raypack.simulate.trace import read_trace
from tests.planning_cases import CLUSTER, MODEL, lengths

SMALL = ["--ranks", 16, "--steps", 2, "--tokens-per-step", 200_000, "--budget", 0, "--clip", 65_536]


def test_the_pure_parts_import_neither_torch_nor_ray() -> None:
    names = [
        "simulate.replay",
        "simulate.summary",
        "report.timeline",
        "calibrate.result",
        "report.pictures",
        "report.page",
        "simulate.policy_chart",
    ]
    code = "import sys, importlib\n" + "".join(f"importlib.import_module('raypack.{name}')\n" for name in names)
    code += "print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["simulate", *(str(a) for a in arguments)])
    assert result.exit_code == code, result.output
    return result.output if code == 0 else result.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npz"
    np.savez(path, lengths=lengths(3, 400, 20_000))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    path = tmp_path_factory.mktemp("trace") / "n.npy"
    np.save(path, lengths(5, 200, 4000))
    trace = read_trace(str(path), tokens_per_step=20_000, seed=1)
    return replay(trace, Topology((4, 4)), CLUSTER, MODEL, ["joint", "static"], 3, budget=20, keep=range(3))


def test_every_step_of_every_policy_holds_the_same_samples(small: Replay) -> None:
    for step, samples in enumerate(small.trace.steps(3)):
        for planned in small.planned.values():
            plan = planned[step].plan
            assert {(p.sample, p.length) for p in plan.placements} == set(
                zip(samples.ids.tolist(), samples.lengths.tolist(), strict=True)
            )
            assert plan.step == step


def test_summaries_are_the_means_of_what_evaluate_says(small: Replay) -> None:
    joint, static = summarise(small)
    figures = [evaluate(each.plan, CLUSTER, MODEL) for each in small.planned["joint"]]
    seconds = [f.seconds for f in figures]
    assert joint.seconds == pytest.approx(np.mean(seconds))
    assert joint.seconds_p95 == max(seconds)
    assert joint.bound_ratio == pytest.approx(np.mean([f.seconds / f.bound_seconds for f in figures]))
    assert joint.bound_ratio_max == pytest.approx(max(f.seconds / f.bound_seconds for f in figures))
    flops = sum(f.mfu * f.seconds for f in figures)
    assert joint.mfu == pytest.approx(flops / sum(seconds))
    for scope in ("intra", "inter"):
        sent = np.mean([sum(site[scope] for site in f.bytes.values()) for f in figures])
        assert getattr(joint, f"{scope}_bytes") == pytest.approx(sent)
    waiting = sum(f.seconds * 8 - f.rank_busy.sum() for f in figures) / (8 * sum(seconds))
    assert joint.waiting_ratio == pytest.approx(waiting, rel=1e-6)
    assert static.speedup == 1
    assert joint.speedup == pytest.approx(static.seconds / joint.seconds)
    assert joint.speedup >= 1


def test_plans_are_kept_only_where_asked_for(small: Replay) -> None:
    done = replay(small.trace, Topology((4, 4)), CLUSTER, MODEL, ["dynamic"], 3, budget=0, keep=[1])
    assert [each.plan is not None for each in done.planned["dynamic"]] == [False, True, False]


def test_a_parent_is_wide_when_it_leaves_its_node(small: Replay) -> None:
    wide = [any(p.parent.width > 4 for p in each.plan.placements) for each in small.planned["static"]]
    assert [each.wide for each in small.planned["static"]] == wide
    assert summarise(small)[1].wide_ratio == np.mean(wide)


def test_static_is_as_wide_as_the_longest_sample_needs_in_steps_without_it(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("\n".join(["100"] * 40 + ["20000"]))
    trace = read_trace(str(tmp_path / "n.txt"), tokens_per_step=1000, seed=2)
    done = replay(trace, Topology((4, 4)), CLUSTER, MODEL, ["static"], 3, keep=range(3))
    assert {p.parent.width for each in done.planned["static"] for p in each.plan.placements} == {8}


def test_json_says_what_was_simulated_and_what_came_out(small: Replay) -> None:
    data = json.loads(json.dumps(to_data(small, summarise(small)), allow_nan=False))
    assert (data["ranks"], data["nodes"], data["tokens_per_step"], data["sync"]) == (8, [4, 4], 20_000, "step")
    assert list(data["policies"]) == ["joint", "static"]
    assert [step["step"] for step in data["steps"]] == [0, 1, 2]
    for step in data["steps"]:
        assert step["longest"] <= step["tokens"] <= 20_000
        assert step["samples"] > 1
        assert set(step["policies"]["joint"]) >= {"seconds", "bound_seconds", "mfu", "bytes", "plan_seconds", "rounds"}
    mean = np.mean([step["policies"]["joint"]["seconds"] for step in data["steps"]])
    assert data["policies"]["joint"]["seconds"] == pytest.approx(mean)


def test_the_command_prints_a_table_and_writes_the_same_figures(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    table = run("--lengths", file, *SMALL, "--policies", "static, dynamic", "--json", out)
    data = json.loads(out.read_text())
    assert "mean step seconds" in table
    assert f"{data['policies']['dynamic']['seconds']:.4f}" in table
    assert "lengths.npz (file), 400 documents" in table
    assert list(data["policies"]) == ["static", "dynamic"]


def test_the_command_is_deterministic_but_for_plan_seconds() -> None:
    both = [
        json.loads(run("--lengths", "prolong", *SMALL, "--policies", "dynamic", "--seed", seed, "--json", "-"))
        for seed in (4, 4, 5)
    ]
    for data in both:
        del data["policies"]
        for step in data["steps"]:
            del step["policies"]["dynamic"]["plan_seconds"]
    assert both[0] == both[1]
    assert both[0]["steps"] != both[2]["steps"]


def test_help_lists_the_length_presets_with_their_kind() -> None:
    text = run("--help")
    assert "wikipedia      measured:" in text
    assert "github-like    assumed:" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "wikipaedia"], "no length preset 'wikipaedia': there are wikipedia"),
        (["--lengths", "prolong", "--cluster", "dgx"], "no cluster preset 'dgx': there are a100-8x8"),
        (["--lengths", "prolong", "--model", "gpt"], "no model preset 'gpt': there are"),
        (["--lengths", "prolong", "--ranks", 65], "ranks = 65: cluster h100-8x8 has 64"),
        (["--lengths", "prolong", "--policies", "static,ring"], "policies = 'ring': must be 'static', 'dynamic'"),
        (["--lengths", "prolong", "--policies", ","], "policies: there is none"),
        (["--lengths", "prolong", "--policies", "joint,joint"], "occurs twice"),
        (["--lengths", "prolong", "--steps", 0], "steps = 0: must lie in 1"),
        (["--lengths", "prolong", "--tokens-per-step", 0], "tokens-per-step = 0"),
        (["--lengths", "prolong", "--budget", -1], "budget = -1"),
        (["--lengths", "prolong", "--cap", 0], "rank_tokens_max"),
        (["--lengths", "prolong", "--ranks", 8], "fits no block of 8 ranks"),
        (["--lengths", "prolong", "--picture-step", 0], "needs --picture"),
        (["--lengths", "prolong", "--picture", "x.gif"], ".png, .svg or .pdf"),
        (["--lengths", "prolong", "--picture", "x.png", "--picture-step", 20], "the steps are 0..19"),
        (["--lengths", "gone.txt"], "no such file"),
    ],
)
def test_bad_requests_get_one_line(arguments: list, words: str) -> None:
    error = run(*arguments, code=2)
    assert words in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["0\n5\n", "-4\n", "1.5\n", "", "ten\n"])
def test_bad_length_files_get_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.txt").write_text(text)
    assert len(run("--lengths", tmp_path / "bad.txt", code=2).strip().splitlines()) == 1


def test_a_failed_simulation_writes_nothing(tmp_path: Path) -> None:
    run("--lengths", "prolong", "--ranks", 8, "--json", tmp_path / "x.json", "--picture", tmp_path / "x.png", code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_fits_nowhere_is_refused_even_if_no_step_draws_it(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("\n".join(["100"] * 300 + ["90000"]))
    trace = read_trace(str(tmp_path / "n.txt"), tokens_per_step=500, seed=0)
    assert all(s.lengths.max() == 100 for s in trace.steps(1))
    with pytest.raises(RaypackError, match=r"sample 300: length = 90000 .* --clip"):
        replay(trace, Topology((4,)), CLUSTER, MODEL, ["dynamic"], 1)


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_cluster_presets_say_where_their_figures_come_from(name: str) -> None:
    cluster = load_cluster(name)
    assert "assumed" in cluster.source.lower() or "pinned" in cluster.source, "what is not on a data sheet is marked"
    assert cluster.intra_rate > cluster.inter_rate
    shape = name.rpartition("-")[2]
    assert f"{cluster.nodes}x{cluster.ranks_per_node}" == shape


@pytest.mark.parametrize("name", ["a100-8x8", "h100-64x8", "h200-8x8"])
def test_cluster_presets_of_data_sheets_plan_every_policy(name: str) -> None:
    trace = read_trace("prolong", tokens_per_step=60_000, seed=0, clip=32_768)
    topology = Topology.regular(16, 8)
    done = replay(trace, topology, load_cluster(name), load_model("1f3s-30b-a3b"), list(POLICIES), 1, budget=0)
    seconds = [planned[0].figures.seconds for planned in done.planned.values()]
    assert seconds == sorted(seconds, reverse=True), "no policy is worse than the ones before it"
