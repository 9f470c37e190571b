"""The public names: the examples in raypack's own text, imports only when asked, and what a type checker sees."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import raypack

ROOT = Path(__file__).resolve().parent.parent


def test_the_examples_in_the_packages_text_hold() -> None:
    done = doctest.testmod(raypack, optionflags=doctest.ELLIPSIS)
    assert done.attempted > 15
    assert done.failed == 0


def test_the_example_of_the_first_page_holds() -> None:
    done = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert done.attempted > 5
    assert done.failed == 0


def test_every_public_name_is_there_with_a_text_and_an_unknown_one_is_not() -> None:
    for name in set(raypack.__all__) - {"__version__"}:
        found = getattr(raypack, name)
        assert len(inspect.getdoc(found) or "") > 20, name
        assert name in dir(raypack)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        raypack.nothing  # noqa: B018


def test_importing_raypack_imports_nothing_else() -> None:
    code = (
        "import sys, json, raypack\n"
        "before = sorted(m for m in sys.modules if m.startswith('raypack.') or m in ('torch', 'ray', 'numpy'))\n"
        "raypack.load_cluster('h100-8x8')\n"
        "print(json.dumps([before, sorted(m for m in ('torch', 'ray') if m in sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert json.loads(done.stdout) == [["raypack.version"], []]


def test_a_type_checker_reads_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(raypack.__file__).read_text(encoding="utf-8"))
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    seen = {a.asname: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == raypack._WHERE
