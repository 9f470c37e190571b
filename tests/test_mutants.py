"""The list of mutants does not rot, and its runner tells a caught one from one that lives (`make mutants` runs it)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.machine import scaled
from tests.mutant_list import MUTANTS, Mutant
from tests.mutants import ROOT, edited, main, pytest_in, unsound


def test_every_mutant_can_be_made() -> None:
    assert len(MUTANTS) >= 25
    assert unsound(ROOT, MUTANTS) == []


def test_every_named_test_exists() -> None:
    names = sorted({m.test for m in MUTANTS})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *names],
        capture_output=True, text=True, timeout=scaled(120), check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]


CODE = "def half(x):\n    return x / 2\n\n\ndef less(a, b):\n    return a < b\n"
TESTS = """import time
from raypack import code

def test_half():
    assert code.half(3) == 1.5

def test_less():
    assert code.less(1, 2)

def test_wrong():
    assert not code.less(1, 2)

def test_stuck():
    time.sleep(0 if code.half(2) == 1 else 600)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {"raypack/__init__.py": "", "raypack/code.py": CODE, "tests/test_code.py": TESTS}.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


def mutant(name: str, old: str, new: str, test: str = "") -> Mutant:
    return Mutant(name, "raypack/code.py", old, new, "", f"tests/test_code.py::test_{test or name}")


HALF, LESS = mutant("half", "x / 2", "x // 2"), mutant("less", "a < b", "a <= b")
STUCK = mutant("stuck", "x / 2", "x * 2", "stuck")


def test_a_mutant_that_no_test_sees_lives_and_is_an_error(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "half"], checkout, [HALF, LESS]) == 0
    assert "1 of 1 caught" in capsys.readouterr().out
    assert main([], checkout, [HALF, LESS]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 caught" in said
    rows = [line for line in said.splitlines() if "code.py" in line]
    assert ["caught" in row for row in rows] == [True, False, False]
    assert "LIVES" in rows[1]
    assert rows[2] == LESS.test  # by its whole name
    assert (checkout / "raypack/code.py").read_text() == CODE


def test_a_test_that_fails_anyway_catches_nothing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], checkout, [mutant("wrong", "a < b", "a <= b")]) == 1
    said = capsys.readouterr().out
    assert "A named test fails without any mutant" in said
    assert "test_wrong" in said
    assert "caught" not in said


def test_a_test_that_cannot_even_run_catches_nothing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], checkout, [mutant("broken", "def half", "import nothing_of_this_name\ndef half", "half")]) == 1
    said = capsys.readouterr().out
    assert "BROKEN" in said
    assert "No module named 'nothing_of_this_name'" in said
    assert "0 of 1 caught" in said


def test_a_test_that_never_ends_is_killed(checkout: Path) -> None:
    with edited(checkout, STUCK):
        assert pytest_in(checkout, [STUCK.test], 2.0) == (None, "")
    assert (checkout / "raypack/code.py").read_text() == CODE
    assert working_in(checkout) == []


def test_a_list_that_has_rotted_says_where(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        mutant("gone", "x / 3", "x / 4"): "gone: raypack/code.py has its old text 0 times",
        mutant("twice", "return", "pass"): "twice: raypack/code.py has its old text 2 times",
        mutant("same", "x / 2", "(x / 2)"): "same: its new text means the same as its old one",
        mutant("no-python", "x / 2", "x /"): "no-python: raypack/code.py with its new text is no Python",
    }
    found = unsound(checkout, [*wrong, HALF, HALF])
    assert [line.startswith(text) for line, text in zip(found, wrong.values(), strict=False)] == [True] * len(wrong)
    assert found[-1] == "half: two mutants have this name"
    assert main([], checkout, list(wrong)) == 1
    assert "has its old text 0 times" in capsys.readouterr().out


def test_ctrl_c_leaves_neither_a_process_nor_a_file(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("interrupted")
    code = (
        "import sys; from pathlib import Path; from tests.mutants import main; from tests.mutant_list import Mutant\n"
    )
    code += f"main([], Path({str(checkout)!r}), [{STUCK!r}])\n"
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + scaled(60)
    while not (any("x * 2" in f.read_text() for f in folder.glob("*/raypack/code.py")) and working_in(folder)):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    running.wait(scaled(30))
    assert list(folder.iterdir()) == []
    assert working_in(folder) == []


def working_in(folder: Path) -> list[int]:
    """Processes whose current directory lies there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "cwd").startswith(str(folder)):
                found.append(int(process.name))
    return found
