"""Settings of a run: defaults, then the file, then flags; whatever is wrong is one line that says what to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli_w

from raypack.config import Config, preset_names
from raypack.config.help import reference_page
from raypack.config.runfile import Request, load_run, read_request
from raypack.config.settings import settings_of
from raypack.config.units import Unit
from raypack.errors import RaypackError
from tests.job_runs import ROOT

LOCAL, GPU = "1f3s_local", "1f3s_gpu"


def load(*arguments: str) -> Config:
    return load_run(arguments)


def test_flags_lie_over_the_file_and_the_file_over_the_defaults() -> None:
    config = load("--train.lr", "0.5", "--topology.nodes", "[1, 3]", "--plan.keep", "true", "--run.name=here")
    assert (config.train.lr, config.topology.nodes, config.plan.keep) == (0.5, (1, 3), True)
    assert config.model.experts == 8  # the file's
    assert config.train.beta2 == Config().train.beta2  # the default
    assert config.run.name == "here"


def test_a_run_without_a_name_gets_the_files_and_the_time() -> None:
    first = load().run.name
    assert first.startswith("1f3s_local-20")
    assert load("--run", GPU).run.name.startswith("1f3s_gpu-20")


def test_a_run_is_named_by_preset_or_file_first_or_by_flag(tmp_path: Path) -> None:
    assert load("--run.name=x") == load(LOCAL, "--run.name=x") == load("--run", LOCAL, "--run.name=x")
    file = tmp_path / "mine.toml"
    file.write_text("[run]\nsteps = 7\n")
    assert load(str(file)).run.steps == load("--run", str(file)).run.steps == 7
    assert load(str(file)).run.name.startswith("mine-20")


@pytest.mark.parametrize("name", preset_names("runs"))
def test_every_run_preset_loads(name: str) -> None:
    assert load(name).model.name
    gpu = load(GPU)
    assert gpu.topology.workers == 64
    assert (gpu.model.layers, gpu.model.experts, gpu.model.window) == (48, 128, 4096)


def test_a_preset_from_the_command_line_replaces_the_files_model() -> None:
    model = load("--model.preset", "1f3s-30b-a3b", "--model.layers", "4").model
    assert (model.name, model.width, model.layers) == ("1f3s-30b-a3b", 2048, 4)


def test_what_a_run_resolved_loads_again(tmp_path: Path) -> None:
    config = load("--run.name", "x", "--train.lr", "0.25")
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(config.model_dump()))
    assert load_run(["--run", str(file)]) == config


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--run.step", "3"], ["unknown flag --run.step: did you mean --run.steps?"]),  # no abbreviations
        (["--seed", "3"], ["did you mean --run.seed?"]),
        (["--dryrun"], ["did you mean --dry-run?"]),
        (["--nothing.like.it"], ["unknown flag --nothing.like.it", "--help all"]),
        (["lonely"], ["no run preset 'lonely'", "1f3s_local", "or give a .toml file"]),
        (["--run.steps"], ["--run.steps", "expected one argument"]),
        (["--run.steps", "many"], ["run.steps = 'many'", "integer"]),
        (["--run.steps", "0"], ["run.steps = '0'", "greater than or equal to 1"]),
        (["--train.lr", "nan"], ["train.lr", "finite"]),
        (["--train.lr", "-1"], ["train.lr", "greater than 0"]),
        (["--plan.keep", "maybe"], ["plan.keep", "boolean"]),
        (["--plan.policy", "best"], ["plan.policy = 'best': must be 'static'", "'joint'"]),
        (["--plan.policy", "Jiont"], ["plan.policy = 'Jiont': did you mean 'joint'?"]),
        (["--plan.attention", "kvgather"], ["did you mean 'kv_gather'?"]),
        (["--model.window", "0"], ["model.window = '0'", "greater than or equal to 1"]),
        (["--model.kv_heads", "3"], ["heads = 8", "multiple of kv_heads = 3"]),
        (["--model.head_dim", "15"], ["head_dim = 15", "even"]),
        (["--model.experts_active", "9"], ["experts_active = 9 exceeds experts = 8"]),
        (["--model.dropout", "0.1"], ["dropout = 0.1 is refused", "set it to 0"]),
        (["--model.pattern", "FX"], ["'FX'", "F (full)"]),
        (["--model.preset", "none-such"], ["no model preset 'none-such'", "1f3s-30b-a3b"]),
        (["--model.preset", "1f3s-30b"], ["did you mean 1f3s-30b-a3b?"]),
        (["--topology.nodes", "[4, 3]"], ["nodes = [4, 3]", "workers = 4"]),
        (["--topology.nodes", "[9, -1]"], ["nodes = [9, -1]", "positive"]),
        (["--topology.nodes", "x"], ["topology.nodes", "integer"]),
        (["--topology.workers", "5"], ['--topology.nodes "[3, 2]"', "--topology.workers 4"]),
        (["--topology.workers", "1"], ['--topology.nodes "[1]"']),
        (["--topology.workers", "0"], ["topology.workers", "greater than or equal to 1"]),
        (["--observe.port", "70000"], ["observe.port", "65535"]),
        (["--run", "none-such.toml"], ["none-such.toml", "No such file"]),
        (["--run"], ["--run: expected one argument"]),
        (["--run", "a\0b.toml"], ["cannot read 'a\\x00b.toml'"]),
        (["--run", "1f3s_lokal"], ["no run preset '1f3s_lokal'", "did you mean 1f3s_local?"]),
        (["1f3s_local", "--run", "1f3s_gpu"], ["'1f3s_local' and --run '1f3s_gpu' both name the run"]),
        (["--run.steps", "3", "1f3s_gpu"], ["'1f3s_gpu' belongs to no flag", "as the first argument"]),
        (["--observe.sinks", "wand,x:y"], ["observe.sinks", "did you mean 'wandb'?"]),
        (["--run.name", "a/b"], ["run.name = 'a/b'", "letters"]),
        (["--run.name", ".hidden"], ["run.name = '.hidden'", "dot"]),
        (["--run.name", "läuft"], ["run.name", "a-z"]),
        (["--run.name", "a\0b"], ["run.name", "digits"]),
        (["--run.name", "n" * 300], ["run.name", "1 to 200", "(302 characters)"]),
        (["--data.corpus", "/tmp/" + "d" * 300], ["data.corpus", "300 bytes", "255"]),
        (["--model.layers", "100000000"], ["model.layers = '100000000'", "10000"]),
        (["--topology.gpus_per_worker", "1.5"], ["gpus_per_worker = 1.5", "whole"]),
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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[train]\nlearning_rate = 1.0", "unknown key train.learning_rate: did you mean train.lr?"),
        ("[train]\nbeta_1 = 0.9", "unknown key train.beta_1: did you mean train.beta1?"),
        ("[train]\nsteps = 9", "unknown key train.steps: did you mean run.steps?"),
        ("[data]\nnothing_like_it = 9", "unknown key data.nothing_like_it: there are corpus, max_sample_tokens,"),
        ("lr = 1.0", "unknown key lr: did you mean train.lr?"),
        ("[trian]\nlr = 1.0", "unknown section [trian]: did you mean [train]?"),
        ("run = 4", "run = 4: must be a section of settings, [run]"),
        ("[[train]]\nlr = 1.0", "train = [{'lr': 1.0}]: must be a section"),
        ("[plan]\npolicy = 'reapck'", "plan.policy = 'reapck': did you mean 'repack'?"),
        ("x = " + "[" * 5000, "cannot read"),
        ("x = " + "9" * 5000, "cannot read"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--run.steps", "3", "--model.preset", "lllf-7b"]], ids=["", "flags"])
def test_what_is_wrong_in_a_file_is_said_with_and_without_flags(
    tmp_path: Path, text: str, line: str, flags: list[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text + "\n")
    with pytest.raises(RaypackError) as refused:
        load("--run", str(file), *flags)
    assert str(refused.value).startswith(line)


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        read_request(arguments, LOCAL, "What it does.", "the job")
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_first_and_whole_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    short = helped(capsys, "--help")
    assert len(short.splitlines()) <= 25
    assert all(len(line) <= 90 for line in short.splitlines())
    for text in ("the job", "What it does.", "PRESET", "RUN.toml", "--dry-run", "--help all", "--help SECTION"):
        assert text in short
    whole = helped(capsys, "--help", "all")
    settings = list(settings_of(Config))
    assert all(f"--{setting.path} " in whole for setting in settings)
    train = helped(capsys, "--run.steps", "3", "--help", "train")
    shown = {setting.path for setting in settings if f"--{setting.path} " in train}
    assert shown == {setting.path for setting in settings if setting.path.startswith("train.")}
    assert "AdamW: added to the root" in helped(capsys, "--help", "train.eps")
    with pytest.raises(RaypackError, match="did you mean --help topology"):
        read_request(["--help", "topologie"])


def test_help_shows_the_run_files_own_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--topology.workers 64 " in helped(capsys, "--help", "--run", GPU)
    assert "now 0.0003)" in helped(capsys, "--run", GPU, "--help", "train.lr")


def test_every_setting_says_what_it_is_and_every_number_its_unit_and_limits() -> None:
    fields = {
        f"{section}.{name}": field
        for section, of in Config.model_fields.items()
        for name, field in of.annotation.model_fields.items()  # type: ignore[union-attr]
    }
    for setting in settings_of(Config):
        assert len(setting.description.split()) >= 3 or setting.unit, f"{setting.path}: {setting.description!r}"
        if setting.kind in ("integer", "number"):
            assert any(isinstance(part, Unit) for part in fields[setting.path].metadata), f"{setting.path}: no unit"
            assert re.search(r"\d to \d|below|at most", setting.limits), f"{setting.path}: no upper limit"


def test_the_reference_page_is_what_the_settings_say() -> None:
    page = (ROOT / "docs" / "run-file.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run `make docs`"


def test_a_dry_run_is_a_run_that_is_not_started() -> None:
    asked = read_request(["--run.name", "x", "--dry-run", "--train.lr", "1"])
    assert asked == Request(load("--run.name", "x", "--train.lr", "1"), dry_run=True)
    assert not read_request(["--run.name", "x"]).dry_run
