"""How the command line refuses what it reads: one line, as commands do; apart, so that `--help` stays quick."""

from __future__ import annotations

from typing import IO, Any

import click

LINE_MAX = 1000


class Refusal(click.ClickException):
    """A `RaypackError` while the command line is read: the same line and exit code that commands end with."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        say(self.message)


def say(error: object) -> None:
    """`error: ...` on standard error, without most of a value of thousands of letters that it may quote."""
    line = f"error: {error}"
    if len(line) > LINE_MAX:
        line = f"{line[: LINE_MAX // 2]} [...] {line[-LINE_MAX // 2 :]}"
    click.echo(line, err=True)
