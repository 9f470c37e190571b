"""The `raypack` command. A subcommand's module is imported only when it is called, so that `--help` stays quick."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from typing import NamedTuple

import click

from raypack.commands.refusal import Refusal
from raypack.version import __version__


class Entry(NamedTuple):
    """Where a subcommand lives, and the line that `raypack --help` shows for it."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "train": Entry("raypack.commands.train", "train", "Train a model: run files, presets, every setting a flag."),
    "data": Entry("raypack.commands.data", "data", "Build a corpus from files, look at one."),
    "plan": Entry("raypack.commands.plan", "plan", "Plan one step of given sample lengths."),
    "evaluate": Entry("raypack.commands.plan", "evaluate", "Cost a plan on a described cluster."),
    "simulate": Entry("raypack.commands.simulate", "simulate", "Compare policies on a described cluster."),
    "calibrate": Entry("raypack.commands.calibrate", "calibrate", "Measure the ranks at hand: a cluster file."),
    "cluster": Entry("raypack.commands.cluster", "cluster", "Compare a run with a cluster, before it costs anything."),
    "inspect": Entry("raypack.commands.inspect", "inspect", "Summarise a run from its records."),
}


def there(entry: Entry) -> bool:
    """Whether the module of `entry` can be found; it is not imported."""
    try:
        return importlib.util.find_spec(entry.module) is not None
    except ModuleNotFoundError:
        return False


class LazyGroup(click.Group):
    """A group over a table of entries. One whose module is not there is left out and breaks none of the others."""

    def __init__(self, *args: object, entries: dict[str, Entry], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.entries = entries

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if any("\0" in each for each in args):
            raise Refusal("an argument holds a NUL character, which no name may; leave it out")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, entry in self.entries.items() if there(entry)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        entry = self.entries[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(entry.module), entry.attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"`raypack {cmd_name}` needs the package {error.name}, which is not installed: pip install raypack[dev]"
            ) from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.entries[name].help) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


@click.group(cls=LazyGroup, entries=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="raypack")
def main() -> None:
    """Elastic training of hybrid-attention models on variable-length data, orchestrated by Ray."""
    for stream in (sys.stdout, sys.stderr):
        # Names of files need not be text, and a terminal need not know every letter.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
