"""Small wrong edits of raypack, each of which one named quick test must catch: is a test able to fail?

    python -m tests.mutants            # all of them; exit code 1 where one lives
    python -m tests.mutants --list
    python -m tests.mutants --only kv-copies-overwritten

The edits are made in a copy, one at a time; the checkout is only read. `mutant_list.py` has the list.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tests.mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("raypack", "tests", "examples", "pyproject.toml")
LIMIT = 120.0
"""Seconds for one mutant's test, or three times what all tests took without a mutant: machines differ."""
BASELINE_LIMIT = 900.0
LOG_WIDTH = 190
TAIL_LINES = 40
FAILED = 1
"""pytest's exit code where a test failed; others mean that it could not be run at all."""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, mutants: Sequence[Mutant] = MUTANTS) -> int:
    """0 where every mutant is caught by its test, and no test fails without one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="this mutant (may be given again)")
    parser.add_argument("--list", action="store_true", help="name the mutants and what they break; run nothing")
    wanted = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    if unknown := sorted(set(wanted.only) - {m.name for m in mutants}):
        parser.error(f"--only {unknown[0]}: no such mutant; --list has their names")
    chosen = [m for m in mutants if not wanted.only or m.name in wanted.only]
    if wanted.list:
        console.print(_listed(chosen))
        return 0
    if wrong := unsound(root, chosen):
        console.print(*wrong, sep="\n", markup=False)
        return 1
    with tempfile.TemporaryDirectory(prefix="raypack-mutants-") as folder:
        return _run(chosen, copied(root, Path(folder)), console)


def unsound(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """A line for every mutant that can't be made: what has changed under it, and what to do."""
    wrong = []
    for m in mutants:
        file = root / m.file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if text.count(m.old) != 1:
            wrong.append(
                f"{m.name}: {m.file} has its old text {text.count(m.old)} times; write it anew so that it is 1"
            )
            continue
        try:
            same = ast.dump(ast.parse(text)) == ast.dump(ast.parse(text.replace(m.old, m.new)))
        except SyntaxError as error:
            wrong.append(f"{m.name}: {m.file} with its new text is no Python: {error}")
            continue
        if same:
            wrong.append(f"{m.name}: its new text means the same as its old one")
    names = [m.name for m in mutants]
    return wrong + [f"{name}: two mutants have this name" for name in sorted(set(names)) if names.count(name) > 1]


def copied(root: Path, folder: Path) -> Path:
    """What the tests need of the checkout, below `folder`."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, folder / name)
    return folder


def _run(mutants: Sequence[Mutant], copy: Path, console: Console) -> int:
    started = time.monotonic()
    with console.status(f"{len(mutants)} mutants: their tests without any of them"):
        code, said = pytest_in(copy, sorted({m.test for m in mutants}), BASELINE_LIMIT)
    if code != 0:
        console.print(_tail(said), markup=False, highlight=False)
        console.print("A named test fails without any mutant: mend that first.")
        return 1
    limit = max(LIMIT, 3 * (time.monotonic() - started))
    table = Table("mutant", "file", Column("test", ratio=1), "", Column("seconds", justify="right"), expand=True)
    for column in table.columns:
        column.no_wrap = True
    outcomes, trouble = [], []
    with console.status("") as status:
        for number, m in enumerate(mutants, 1):
            status.update(f"{number} of {len(mutants)}: {m.name}")
            began = time.monotonic()
            with edited(copy, m):
                code, said = pytest_in(copy, [m.test], limit)
            outcomes.append(_outcome(code))
            if outcomes[-1] != "caught":
                trouble.append(f"{m.name} {outcomes[-1]}: {m.breaks}\n{m.test}\n{_tail(said) if code else ''}")
            file, test = m.file.removeprefix("raypack/"), m.test.removeprefix("tests/").replace("::", " ")
            table.add_row(m.name, file, escape(test), outcomes[-1], f"{time.monotonic() - began:.1f}")
    console.print(table)
    for each in trouble:
        console.print(each, markup=False, highlight=False)
    caught = outcomes.count("caught")
    console.print(f"{caught} of {len(mutants)} caught in {time.monotonic() - started:.0f} s")
    return int(caught < len(mutants))


def _outcome(code: int | None) -> str:
    """Only a test that fails by itself has caught its mutant."""
    if code is None:
        return "HANGS"
    return {0: "LIVES", FAILED: "caught"}.get(code, "BROKEN")


@contextmanager
def edited(copy: Path, mutant: Mutant) -> Iterator[None]:
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(text, encoding="utf-8")


def pytest_in(copy: Path, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
    """pytest's exit code (None: still running after `limit` seconds, and killed) and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    # No bytecode: an edit within the second in which a file was compiled, of as many letters, would not be seen.
    more = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        # Whatever ends this, Ctrl-C too: the test's own processes go with it.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(said: str) -> str:
    return "\n".join(said.splitlines()[-TAIL_LINES:])


def _listed(mutants: Sequence[Mutant]) -> Table:
    table = Table("mutant", "file", "what it breaks")
    for m in mutants:
        table.add_row(m.name, m.file, m.breaks)
    return table


if __name__ == "__main__":
    # A shell starts background commands deaf to Ctrl-C; and what is asked to end is to tidy up, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
