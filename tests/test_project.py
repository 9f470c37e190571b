"""The frame: what can be imported where, the command, the lock, the Makefile, the benchmark runner."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import raypack
from benchmarks import __main__ as bench
from raypack import cli

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements-cpu.lock").read_text(encoding="utf-8")


def _pure_modules() -> list[str]:
    names = ["raypack.cli", "raypack.config", "raypack.errors", "raypack.plan.topology", "raypack.exchange.layout"]
    package = importlib.import_module("raypack.planning")
    return names + [m.name for m in pkgutil.walk_packages(package.__path__, "raypack.planning.")]


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planning_and_layouts_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys, json, importlib\n"
        f"for name in {_pure_modules()!r}: importlib.import_module(name)\n"
        "print(json.dumps([m for m in ('torch', 'ray') if m in sys.modules]))"
    )
    assert json.loads(_python(code)) == []


def test_help_imports_no_library_beyond_click() -> None:
    code = (
        "import sys, json, contextlib, io\n"
        "from raypack.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as text: main(['--help'], standalone_mode=False)\n"
        "assert 'data' in text.getvalue()\n"
        "heavy = ('torch', 'ray', 'numpy', 'pydantic', 'rich', 'pyarrow', 'matplotlib')\n"
        "print(json.dumps([m for m in heavy if m in sys.modules]))"
    )
    assert json.loads(_python(code)) == []


def test_every_command_there_is_has_help_and_an_unknown_one_is_one_clear_error() -> None:
    runner = CliRunner()
    listed = [name for name, entry in cli.COMMANDS.items() if cli.there(entry)]
    assert listed
    for name in listed:
        done = runner.invoke(cli.main, [name, "--help"])
        assert done.exit_code == 0, done.output
    done = runner.invoke(cli.main, ["dance"])
    assert done.exit_code == 2
    assert "No such command 'dance'" in done.output


def test_a_missing_command_module_breaks_no_other() -> None:
    entries = {
        "gone": cli.Entry("raypack.commands.never_written", "gone", "Not there."),
        "gone-too": cli.Entry("raypack.never.written", "gone", "Not there."),
        "there": cli.Entry("benchmarks.__main__", "main", "There."),
    }
    group = cli.LazyGroup("test", entries=entries)
    runner = CliRunner()
    done = runner.invoke(group, ["--help"])
    assert done.exit_code == 0
    assert "There." in done.output
    assert "gone" not in done.output
    assert runner.invoke(group, ["there", "--list"]).exit_code == 0
    assert runner.invoke(group, ["gone"]).exit_code == 2


def test_a_command_that_lacks_a_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(cli.LazyGroup("test", entries={"x": cli.Entry("lacking", "x", "Lacks.")}), ["x"])
    assert done.exit_code == 1
    assert "a_package_nobody_has" in done.output


def test_version_is_the_package_version() -> None:
    assert CliRunner().invoke(cli.main, ["--version"]).output == f"raypack, version {raypack.__version__}\n"


def _pins() -> dict[str, str]:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines), "name==version only"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def _direct_requirements() -> list[Requirement]:
    return [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]


def test_lock_pins_every_direct_dependency_within_its_range() -> None:
    pins = _pins()
    assert pins["torch"] == "2.13.0"
    for requirement in _direct_requirements():
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} against {version}"


def test_contributing_gives_a_reason_for_every_direct_dependency() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").lower()
    names = [r.name.lower() for r in _direct_requirements()]
    for extra in ("gpu", "wandb", "mlflow"):
        names += [Requirement(r).name for r in PROJECT["optional-dependencies"][extra]]
    assert [name for name in names if f"| `{name}`" not in text] == []


def test_make_setup_refuses_an_older_python_with_one_line(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])' \"$2\"\n"
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=_bare_environment(),
    )  # fmt: skip
    assert done.returncode != 0
    assert "raypack needs Python 3.11 or newer" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "venv").exists()


def _bare_environment() -> dict[str, str]:
    """Without what an outer `make` hands down."""
    return {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}


def test_no_tracked_file_names_a_place_on_one_machine() -> None:
    """Paths of a checkout or a home folder work on one machine only."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, timeout=60, check=False, cwd=ROOT)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    places = [str(ROOT) + "/", str(Path.home()) + "/", "/" + "home/", "/" + "Users/", "/" + "tmp/briefs"]
    # On cloud images the login user's home is a fact of the image.
    allowed = {"cluster.yaml": ("/" + "home/ubuntu/", "/" + "home/ray/")}
    found = []
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if not name or not path.is_file() or path.stat().st_size > 1_000_000:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        for known in allowed.get(name, ()):
            text = text.replace(known, "")
        found += [f"{name}: {place}" for place in places if place in text]
    assert found == []


def test_benchmark_runner_runs_the_others_when_one_fails(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    ran: list[bool] = []

    def broken(quick: bool) -> None:
        raise ValueError("broken on purpose")

    modules = {"a_broken": broken, "b_good": ran.append, "c_baseline": None}
    monkeypatch.setattr(bench, "names", lambda: sorted(modules))
    monkeypatch.setattr(
        bench.importlib, "import_module", lambda name: type("M", (), {"main": _static(modules[name.split(".")[1]])})
    )
    done = CliRunner().invoke(bench.main, ["--quick"])
    assert done.exit_code == 1
    assert ran == [True]
    assert "failed: a_broken" in done.output
    assert CliRunner().invoke(bench.main, ["--only", "nothing"]).exit_code == 2


def _static(function):
    return None if function is None else staticmethod(function)


def test_pre_commit_hooks_are_local_and_name_installed_tools() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    tools = {hook["entry"].split()[0] for repo in config["repos"] for hook in repo["hooks"]}
    pins = _pins()
    packages = {"lint-imports": "import-linter"}
    assert {packages.get(Path(tool).name, Path(tool).name) for tool in tools} <= set(pins)
    assert all(tool.startswith(".venv/bin/") for tool in tools)
