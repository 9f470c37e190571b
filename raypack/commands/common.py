"""What all commands share: how they fail, the files that they write, and how they print data for programs."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import click
from rich.console import Console

from raypack.commands.refusal import Refusal, say
from raypack.errors import RaypackError
from raypack.files import PICTURES, check_new_folder, check_target, listed, write_file

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

STANDARD_OUTPUT = "-"
PAGES = (".html", ".htm")


class OutputFile(click.ParamType):
    """The type of every option that names a file to write.

    The file is checked while the command line is read: a mistake costs no work, and no other file has been written.
    """

    name = "file"

    def __init__(self, *suffixes: str, standard_output: bool = False) -> None:
        """`suffixes` = endings that can be written, none = any; `standard_output`: `-` is allowed, and means that."""
        self.suffixes, self.standard_output = suffixes, standard_output

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        option = param.opts[0] if param else "file"
        try:
            if value == STANDARD_OUTPUT and not self.standard_output:
                raise RaypackError(f"{option} -: does not go to standard output; give the name of a file")
            if value != STANDARD_OUTPUT:
                self.check(value, option)
                _check_distinct(value, option, ctx)
        except RaypackError as error:
            raise Refusal(str(error)) from None
        return value

    def check(self, value: str, option: str) -> None:
        check_target(value, option, self.suffixes)


class OutputFolder(OutputFile):
    """As `OutputFile`, for a directory that is made along with its parents."""

    name = "folder"

    def check(self, value: str, option: str) -> None:
        check_new_folder(value, option)


def _check_distinct(value: str, option: str, ctx: click.Context | None) -> None:
    """Raises RaypackError where two options name one file: the second would replace the first."""
    named: dict[str, str] = ctx.meta.setdefault(__name__, {}) if ctx else {}
    if (other := named.setdefault(value, option)) != option:
        raise RaypackError(f"{other} and {option} both name {value}; give each a file of its own")


json_option = click.option(
    "--json",
    "json_target",
    metavar="FILE",
    type=OutputFile(standard_output=True),
    default=None,
    help="Write the figures as JSON to FILE; - = standard output, and then nothing else on it.",
)


def picture_option(text: str) -> Callable[[F], F]:
    """`--picture FILE`; `text` with `{kinds}` where the endings go."""
    return click.option("--picture", type=OutputFile(*PICTURES), default=None, help=text.format(kinds=listed(PICTURES)))


def handle_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorator (below click's own): errors that a user can mend become `error: text` on stderr and exit code 2.

    Those are a `RaypackError`, a refusal of the system (no such file, no right, no memory), and Ctrl-C, with exit
    code 130.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except RaypackError as error:
            said, code = str(error), 2
        except BrokenPipeError:
            raise  # the reader has gone (`| head`): click ends quietly
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            said, code = f"{where}{error.strerror or error}", 2
        except MemoryError as error:
            said, code = f"out of memory{f' ({error})' if str(error) else ''}; ask for less", 2
        except KeyboardInterrupt:
            said, code = "interrupted", 130
        say(said)
        sys.exit(code)

    return wrapped


def check_number(name: str, value: float, least: float, most: float) -> None:
    """Raises RaypackError for a number outside `least` to `most`, both allowed, or none at all (nan)."""
    if not least <= value <= most:
        raise RaypackError(f"{name} = {value}: must lie in {least:,}..{most:,}")


def people_console(json_target: str | None = None) -> Console:
    """Where tables for people go: standard output, or standard error where `--json -` has taken that."""
    return Console(stderr=json_target == STANDARD_OUTPUT)


def write_json(data: Any, target: str) -> None:
    """Write `data` as one JSON document to the file `target`, or to standard output for `-`. Never half a file.

    Numbers that are not finite, which JSON lacks, become null.

    Raises:
        RaypackError: the file cannot be written.
    """
    text = json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"
    if target == STANDARD_OUTPUT:
        click.echo(text, nl=False)
    else:
        write_file(target, text)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
