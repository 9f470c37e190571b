"""What all commands share: how they fail, and how they print data for programs."""

from __future__ import annotations

import functools
import json
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import click
from rich.console import Console

from raypack.errors import RaypackError

P = ParamSpec("P")
R = TypeVar("R")

json_option = click.option(
    "--json",
    "json_target",
    metavar="FILE",
    default=None,
    help="Write the figures as JSON to FILE; - = standard output, and then nothing else on it.",
)


def handle_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorator (below click's own): a `RaypackError` becomes `error: text` on stderr and exit code 2, Ctrl-C 130."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except RaypackError as error:
            _fail(f"error: {error}", 2)
        except KeyboardInterrupt:
            _fail("error: interrupted", 130)

    return wrapped


def _fail(line: str, code: int) -> NoReturn:
    click.echo(line, err=True)
    sys.exit(code)


def people_console(json_target: str | None = None) -> Console:
    """Where tables for people go: standard output, or standard error where `--json -` has taken that."""
    return Console(stderr=json_target == "-")


def write_json(data: Any, target: str) -> None:
    """Write `data` as one JSON document to the file `target`, or to standard output for `-`. Never half a file.

    Raises:
        RaypackError: the file cannot be written.
    """
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    if target == "-":
        click.echo(text, nl=False)
        return
    write_text(text, target)


def write_text(text: str, target: str | Path) -> None:
    """Write a whole file or nothing: into a temporary sibling, then renamed.

    Raises:
        RaypackError: the file cannot be written.
    """
    path = Path(target)
    if path.exists() and not path.is_file():
        # A pipe or a device (/dev/stdout, a shell's >(...)) must be written in place, not replaced by a file.
        _write_in_place(text, path)
        return
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RaypackError(f"cannot write {path}: {error.strerror or error}; choose another file") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_in_place(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RaypackError(f"cannot write {path}: {error.strerror or error}; choose another file") from None
