"""Settings of a run: defaults, then the file, then flags; whatever is wrong is one line that says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from raypack.config import Config
from raypack.errors import RaypackError
from raypack.runfile import load_run
from tests.job_runs import ROOT

LOCAL, GPU = ROOT / "jobs" / "1f3s_local.toml", ROOT / "jobs" / "1f3s_gpu.toml"


def load(*arguments: str) -> Config:
    return load_run(arguments, LOCAL)


def test_flags_lie_over_the_file_and_the_file_over_the_defaults() -> None:
    config = load("--train.lr", "0.5", "--topology.nodes", "[2, 6]", "--plan.keep", "true", "--run.name=here")
    assert (config.train.lr, config.topology.nodes, config.plan.keep) == (0.5, (2, 6), True)
    assert config.model.experts == 8  # the file's
    assert config.train.beta2 == Config().train.beta2  # the default
    assert config.run.name == "here"


def test_a_run_without_a_name_gets_the_files_and_the_time() -> None:
    first = load().run.name
    assert first.startswith("1f3s_local-20")
    assert load("--run", str(GPU)).run.name.startswith("1f3s_gpu-20")


def test_both_shipped_run_files_load() -> None:
    assert load("--run", str(LOCAL)).topology.nodes == (4, 4)
    gpu = load("--run", str(GPU))
    assert gpu.topology.workers == 64
    assert (gpu.model.layers, gpu.model.experts, gpu.model.window) == (48, 128, 4096)


def test_a_preset_from_the_command_line_replaces_the_files_model() -> None:
    model = load("--model.preset", "1f3s-30b-a3b", "--model.layers", "4").model
    assert (model.name, model.width, model.layers) == ("1f3s-30b-a3b", 2048, 4)


def test_what_a_run_resolved_loads_again(tmp_path: Path) -> None:
    config = load("--run.name", "x", "--train.lr", "0.25")
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(config.model_dump()))
    assert load_run(["--run", str(file)], LOCAL) == config


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--run.stepz", "3"], ["--run.stepz", "--help"]),
        (["--run.step", "3"], ["--run.step 3"]),  # no abbreviations
        (["lonely"], ["lonely"]),
        (["--run.steps"], ["--run.steps", "expected one argument"]),
        (["--run.steps", "many"], ["run.steps = 'many'", "integer"]),
        (["--run.steps", "0"], ["run.steps = '0'", "greater than or equal to 1"]),
        (["--train.lr", "nan"], ["train.lr", "finite"]),
        (["--train.lr", "-1"], ["train.lr", "greater than 0"]),
        (["--plan.keep", "maybe"], ["plan.keep", "boolean"]),
        (["--plan.policy", "best"], ["plan.policy = 'best'", "'joint'"]),
        (["--model.window", "0"], ["model.window = '0'", "greater than or equal to 1"]),
        (["--model.kv_heads", "3"], ["heads = 8", "multiple of kv_heads = 3"]),
        (["--model.head_dim", "15"], ["head_dim = 15", "even"]),
        (["--model.experts_active", "9"], ["experts_active = 9 exceeds experts = 8"]),
        (["--model.dropout", "0.1"], ["dropout = 0.1 is refused", "set it to 0"]),
        (["--model.pattern", "FX"], ["'FX'", "F (full)"]),
        (["--model.preset", "none-such"], ["no model preset 'none-such'", "1f3s-30b-a3b"]),
        (["--topology.nodes", "[4, 3]"], ["nodes = [4, 3]", "workers = 8"]),
        (["--topology.nodes", "[9, -1]"], ["nodes = [9, -1]", "positive"]),
        (["--topology.nodes", "x"], ["topology.nodes", "integer"]),
        (["--topology.workers", "0"], ["topology.workers", "greater than or equal to 1"]),
        (["--observe.port", "70000"], ["observe.port", "65535"]),
        (["--run", "none-such.toml"], ["none-such.toml", "No such file"]),
        (["--run"], ["--run", "run file"]),
        (["--run", str(ROOT / "README.md")], ["README.md"]),
    ],
)
def test_nonsense_is_refused_in_one_line(
    arguments: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RaypackError) as refused:
        load(*arguments)
    assert "\n" not in str(refused.value)
    for text in texts:
        assert text in str(refused.value)
    assert capsys.readouterr() == ("", "")


def test_an_unknown_key_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlearning_rate = 1.0\n")
    with pytest.raises(RaypackError, match=r"unknown key train\.learning_rate"):
        load("--run", str(file))
    file.write_text("[trian]\nlr = 1.0\n")
    with pytest.raises(RaypackError, match="unknown key trian"):
        load("--run", str(file))


def test_help_shows_the_run_files_own_values_and_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help", "--run", str(LOCAL))
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--topology.workers" in text
    assert "default: 8" in text  # the file's
    assert "longest sample, tokens" in text
