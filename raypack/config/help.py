"""What a job says of its settings: a short help, one section or all of them on demand, and docs/run-file.md.

Everything comes from the fields of `raypack.config`; nothing here knows a setting but the choice of the ten used most.
`python -m raypack.config.help FILE` (`make docs`) writes the page.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from raypack.config import Config, preset_names
from raypack.config.settings import Setting, number, settings_of
from raypack.errors import RaypackError
from raypack.near_miss import did_you_mean, near_miss

USED_MOST = (
    "run.name",
    "run.steps",
    "run.resume",
    "model.preset",
    "data.corpus",
    "data.tokens_per_step",
    "plan.policy",
    "topology.workers",
    "topology.nodes",
    "train.lr",
)
SECTIONS = tuple(Config.model_fields)
EMPTY = '""'
COLUMNS = 100
"""Help is never wider, however wide the terminal is."""


def help_text(topic: str, values: Config, *, program: str, description: str, run: str) -> str:
    """What `--help TOPIC` prints: "" = the short help, `all`, a section, or one `section.key`.

    Args:
        values: shown as the values that a run would have now.
        program, description, run: for the short help; `run` = the run preset or file.

    Raises:
        RaypackError: no such topic.
    """
    every = list(settings_of(Config))
    out = click.HelpFormatter(width=min(COLUMNS, shutil.get_terminal_size().columns) - 1)
    wanted = topic.removeprefix("--").lower()
    if not wanted:
        _short_help(out, every, values, program, description.strip(), run)
    elif wanted == "all" or wanted in SECTIONS:
        for section in SECTIONS if wanted == "all" else (wanted,):
            with out.section(f"[{section}] {_about(section).rstrip('.')}"):
                out.write_dl([_row(s, values) for s in every if s.path.startswith(f"{section}.")])
    elif wanted in {setting.path for setting in every}:
        out.write_dl([_row(setting, values) for setting in every if setting.path == wanted])
    else:
        near = near_miss(wanted, ["all", *SECTIONS, *(setting.path for setting in every)])
        meant = did_you_mean(f"--help {near}" if near else "", "")
        raise RaypackError(f"no help on {topic!r}: {meant} topics are all, {', '.join(SECTIONS)}, or a section.key")
    return out.getvalue().strip("\n")


def _short_help(
    out: click.HelpFormatter, every: list[Setting], values: Config, program: str, description: str, run: str
) -> None:
    out.write(f"usage: {program} [RUN.toml | PRESET] [--section.key VALUE]... [--dry-run] [--help [TOPIC]]\n\n")
    out.write(f"{description}\n\n" if description else "")
    rows = [
        ("PRESET", f"{', '.join(preset_names('runs'))}; shown is {_nearest(run)}"),
        ("RUN.toml", "a run file; both also as --run RUN"),
        ("--dry-run", "check all, show the first plan, start nothing"),
        ("--help all", "every setting with its unit and limits"),
        ("--help SECTION", "those of one section"),
    ]
    used = {setting.path: setting for setting in every}
    for path in USED_MOST:
        text = re.split(r"[;(:]", used[path].description)[0].strip()
        rows.append((f"--{path} {_written(_value(values, path)) or EMPTY}", text))
    out.write_dl(rows, col_max=40)
    out.write(f"\nSections: {', '.join(SECTIONS)}.\n")
    out.write("Shown are values without flags. A flag lies over the run file, that over the defaults.\n")


def _nearest(run: str) -> str:
    """Of a path the shorter of it and the same seen from here."""
    return min(run, os.path.relpath(run), key=len)


def _row(setting: Setting, values: Config) -> tuple[str, str]:
    """Flag; what it means, what may be given, and the value without the flag."""
    value = _written(_value(values, setting.path)) or "empty"
    return f"--{setting.path}", f"{setting.description}  ({_may_be(setting)}; now {value})"


def _value(values: Config, path: str) -> Any:
    section, _, key = path.partition(".")
    return getattr(getattr(values, section), key)


def _may_be(setting: Setting) -> str:
    """Kind or choices, unit and limits: `integer, tokens, 2 to 2,147,483,647`."""
    if setting.choices:
        few = "one of " if setting.kind == "choice" else f"{setting.kind}: "
        return few + ", ".join(_written(choice) or "empty" for choice in setting.choices)
    return ", ".join(filter(None, [setting.kind, setting.unit, setting.limits]))


def _written(value: Any) -> str:
    """A value as a command line has it; "" for empty text."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return str(value).lower() if isinstance(value, bool) else number(value).replace(",", "")


def _about(section: str) -> str:
    """First sentence or two on a section: its class' docstring, on one line."""
    return " ".join(inspect.cleandoc(Config.model_fields[section].annotation.__doc__ or "").split())


def reference_page() -> str:
    """docs/run-file.md."""
    every = list(settings_of(Config))
    presets = (", ".join(f"`{name}`" for name in preset_names(kind)) for kind in ("runs", "models", "clusters"))
    parts = [PAGE_HEAD, "Presets of runs: {}. Of `model.preset`: {}. Of `plan.cluster`: {}.\n".format(*presets)]
    for section in SECTIONS:
        parts.append(
            f"## [{section}]\n\n{_about(section)}\n\n" + _table(s for s in every if s.path.startswith(f"{section}."))
        )
    return "\n".join(parts)


def _table(settings: Iterable[Setting]) -> str:
    lines = ["| setting | what it is | type | unit | may be | default |", "|---|---|---|---|---|---|"]
    for setting in settings:
        may_be = " ".join(f"`{_written(choice) or EMPTY}`" for choice in setting.choices) or setting.limits
        default = _written(setting.default) or EMPTY
        cells = (f"`{setting.path}`", setting.description, setting.kind, setting.unit, may_be, f"`{default}`")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


PAGE_HEAD = """# The run file

Every setting of a run, `raypack train RUN`. RUN is a preset's name, or a run file: TOML, a table for each section:

    [train]
    lr = 3e-3

`--train.lr 3e-3` on the command line lies over the run file, and that over the defaults below; a `model.preset` lies
under the rest of `[model]`. `--dry-run` checks it all and shows the first plan. `--help train` shows a section with the
values of the run file at hand. `runs/NAME/config.toml` holds what a run resolved, and is a run file too.

Where a setting may be `package.module:object`, an object of your own takes the place of the shipped ones:
[your own parts](use.md#your-own-parts). A share is a number from 0 to 1. Upper limits of a billion or so are no advice:
they catch typing errors.

Generated from `raypack/config/tree.py` by `make docs`.
"""


def main() -> None:
    Path(sys.argv[1]).write_text(reference_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
