"""What holds for every subcommand: outputs are refused before work, results are shown before they are written, and
nonsense is one line."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from raypack.cli import COMMANDS, main
from raypack.commands.common import OutputFile
from raypack.errors import RaypackError
from raypack.files import check_target, write_file
from tests.observe_cases import record


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def refused(result: Result) -> str:
    """The one line that a command ends with."""
    assert result.exit_code == 2, (result.output, result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert len(lines[0]) < 1100
    return lines[0]


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, entry in COMMANDS.items():
        found = getattr(importlib.import_module(entry.module), entry.attribute)
        if isinstance(found, click.Group):
            yield from (((name, below), each) for below, each in found.commands.items())
        else:
            yield (name,), found


# Inputs that are not there: a refusal that names the output came before they were looked for.
INPUTS: dict[tuple[str, ...], list[str]] = {
    ("data", "build"): ["--input", "missing", "--out", "corpus"],
    ("data", "stats"): ["missing.txt"],
    ("plan",): ["--lengths", "missing.txt"],
    ("evaluate",): ["missing.json"],
    ("simulate",): ["--lengths", "missing.txt"],
    ("calibrate",): ["--nodes", "nonsense", "--out", "c.toml"],
    ("cluster", "check"): ["missing.toml"],
    ("inspect",): ["missing"],
}
OUTPUTS = [
    (command, option.opts[0], option.type)
    for command, each in commands()
    if command in INPUTS
    for option in each.params
    if isinstance(option.type, OutputFile)
]


def test_every_option_that_names_a_file_to_write_is_checked_by_the_one_type() -> None:
    found = {(" ".join(command), option) for command, option, _ in OUTPUTS}
    assert found >= {
        ("data build", "--out"), ("data build", "--json"), ("data stats", "--json"), ("plan", "--out"),
        ("plan", "--json"), ("plan", "--picture"), ("evaluate", "--json"), ("evaluate", "--picture"),
        ("simulate", "--json"), ("simulate", "--picture"), ("calibrate", "--out"), ("calibrate", "--json"),
        ("cluster check", "--json"), ("inspect", "--html"), ("inspect", "--json"), ("inspect", "--picture"),
    }  # fmt: skip
    for command, each in commands():
        paths = [option.opts[0] for option in each.params if isinstance(option.type, click.Path | click.File)]
        assert set(paths) <= {"runs", "--compare"}, f"{command}: an output beside the one type?"


@pytest.mark.parametrize(("command", "option", "kind"), OUTPUTS, ids=str)
def test_outputs_are_refused_before_inputs_are_read(
    tmp_path: Path, command: tuple[str, ...], option: str, kind: OutputFile
) -> None:
    suffix = kind.suffixes[0] if kind.suffixes else ".json"
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "file").touch()
    bad = ["", f"{tmp_path}/file/x{suffix}", f"{tmp_path}/{'x' * 300}{suffix}", f"/proc/x{suffix}", f"\udcff{suffix}"]
    if kind.name == "file":  # a corpus is a folder, made with its parents
        bad += [f"{tmp_path}/none/x{suffix}", f"{tmp_path}/folder{suffix}"]
    bad += [f"{tmp_path}/x.gif"] if kind.suffixes else []
    bad += [] if kind.standard_output else ["-"]
    for target in bad:
        assert option in refused(invoke(*command, *INPUTS[command], option, target)), target
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", f"folder{suffix}"]
    line = refused(invoke(*command, *INPUTS[command], option, tmp_path / f"fine{suffix}"))
    assert "missing" in line or "nonsense" in line


def test_two_outputs_never_share_a_file(tmp_path: Path) -> None:
    line = refused(invoke("plan", "--lengths", "missing.txt", "--out", tmp_path / "x", "--json", tmp_path / "x"))
    assert "--out and --json both name" in line


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "lengths.txt").write_text("100\n5000\n300\n")
    (folder / "run").mkdir()
    (folder / "run" / "steps.jsonl").write_text(record(0).to_json() + "\n")
    assert invoke("plan", "--lengths", folder / "lengths.txt", "--ranks", 4, "--out", folder / "p.json").exit_code == 0
    return folder


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (("plan", "--lengths", "lengths.txt", "--ranks", 4, "--budget", 0), "seconds of the step"),
        (("evaluate", "p.json"), "seconds of the step"),
        (
            ("simulate", "--lengths", "lengths.txt", "--ranks", 4, "--budget", 0, "--steps", 1, "--policies", "static"),
            "mean step seconds",
        ),
        (("data", "stats", "lengths.txt"), "documents"),
        (("inspect", "run"), "seconds a step"),
        (("inspect", "run", "run"), "mean step seconds"),
    ],
)
def test_a_result_is_shown_before_a_write_that_fails(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], shows: str
) -> None:
    monkeypatch.chdir(inputs)
    done = invoke(*arguments, "--json", "/dev/full")
    assert shows in done.stdout
    assert "No space left" in refused(done)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "says"),
    [
        ("p.json", b'{"ranks": 100000000000, "rounds": [[]]}', ("evaluate", "p.json"), "at most 65536"),
        ("p.json", b'{"ranks": 4, "rounds": [[{"sample": 0, "length": 99999999999999999999, "parent": [0, 4], "child": '
         b'[0, 4]}]]}', ("evaluate", "p.json"), "length = 99999999999999999999"),
        ("p.json", b"[" * 100_000, ("evaluate", "p.json"), "plan is not JSON"),
        ("p.json", b'{"ranks": "' + b"x" * 100_000 + b'", "rounds": [[]]}', ("evaluate", "p.json"), "plan ranks = "),
        ("p.json", b"\xff\xfe", ("evaluate", "p.json"), "is no UTF-8 text"),
        ("c.toml", b"nodes = 1000000000\nranks_per_node = 8\n",
         ("plan", "--lengths", "lengths.txt", "--cluster", "c.toml"), "less than or equal to 8192"),
        ("n.txt", b"99999999999999999999", ("plan", "--lengths", "n.txt"), "length exceeds"),
        ("run/config.toml", b"[[[", ("inspect", "run", "run"), "config.toml"),
        ("run/config.toml", b"\xff", ("inspect", "run"), "config.toml"),
        ("run/steps.jsonl", b"\xff\n", ("inspect", "run"), "steps.jsonl"),
        ("run/summary.json", b"[]", ("inspect", "run"), "summary.json"),
        ("x", b"", ("inspect", "x" * 300), "too long"),
        ("x", b"", ("inspect", "a\0b"), "NUL"),
        ("x", b"", ("plan", "--lengths", "x" * 300 + ".txt"), "too long"),
        ("x", b"", ("evaluate", "x" * 300), "too long"),
        ("x", b"", ("evaluate", "/dev/zero"), "more than 256 MB"),
        ("x", b"", ("plan", "--lengths", "lengths.txt", "--budget", 10**20), "budget = 100000000000000000000"),
        ("x", b"", ("plan", "--lengths", "lengths.txt", "--budget-seconds", "inf"), "budget-seconds = inf"),
        ("x", b"", ("plan", "--lengths", "lengths.txt", "--budget-seconds", "nan"), "budget-seconds = nan"),
        ("x", b"", ("simulate", "--lengths", "prolong", "--steps", 10**11), "steps = 100000000000"),
        ("x", b"", ("simulate", "--lengths", "prolong", "--clip", 10**20), "clip = 100000000000000000000"),
        ("x", b"", ("calibrate", "--out", "c.toml", "--timeout", "inf"), "timeout = inf"),
        ("x", b"", ("calibrate", "--out", "c.toml", "--ranks", 10**11), "at most 65536"),
        ("x", b"", ("calibrate", "--out", "c.toml", "--nodes", "8," * 9999 + "8"), "at most 65536"),
        ("x", b"", ("data", "build", "--input", "x" * 300, "--out", "c"), "too long"),
    ],
)  # fmt: skip
def test_nonsense_is_one_line_and_writes_nothing(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes,
    arguments: tuple[object, ...], says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for given in ("lengths.txt", "run/steps.jsonl"):
        (tmp_path / given).write_bytes((inputs / given).read_bytes())
    (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert says in refused(invoke(*arguments))
    assert sorted(tmp_path.rglob("*")) == before


def test_numbers_that_json_lacks_become_null(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(record(0).to_json().replace('"seconds":3.0', '"seconds":NaN') + "\n")
    done = invoke("inspect", inputs / "run", tmp_path, "--json", "-")
    assert json.loads(done.stdout)["figures"]["mean step seconds"]["values"] == [3.0, None]


def test_words_that_are_no_text_pass_over(inputs: Path, tmp_path: Path) -> None:
    """Names of runs and lines of `attempts.jsonl` that no terminal and no decoder knows."""
    run = tmp_path / "a\udcffb"
    run.mkdir()
    (run / "steps.jsonl").write_text(record(0).to_json() + "\n")
    (run / "attempts.jsonl").write_bytes(b"\xff\xfe\n")
    done = invoke("inspect", run, "--html", tmp_path / "page.html", "--json", tmp_path / "figures.json")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "figures.json").read_text())["steps"] == 1
    assert "a\\xffb" in (tmp_path / "page.html").read_text()


def test_a_file_is_whole_or_as_it_was_and_a_link_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write_file(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"

    def fail(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(RaypackError, match="No space left"):
        write_file(file, "newer")
    assert file.read_text() == "new"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]


def test_a_protected_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as for anybody but an administrator
    with pytest.raises(RaypackError, match="is write-protected"):
        check_target(tmp_path / "file", "--json")
