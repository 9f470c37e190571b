"""Settings of a run from defaults, a run preset or file, and `--section.key value`, in this order of precedence."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from raypack.config import Config, build, preset_or_file
from raypack.config.help import help_text
from raypack.config.settings import plain, settings_of, shown
from raypack.errors import RaypackError
from raypack.near_miss import did_you_mean, near_miss, near_setting

DEFAULT = "1f3s_local"
"""The run preset where none is named."""
SHORT = {"trace": "observe.trace"}
"""Flags with a short name too."""


@dataclass(frozen=True)
class Request:
    """What the arguments of a job ask for: a run, or with `dry_run` only what it would do."""

    config: Config
    dry_run: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RaypackError(f"{message.removeprefix('argument ')}; --help shows how flags are given")


def read_request(argv: Sequence[str], default: str = DEFAULT, description: str = "", program: str = "") -> Request:
    """As `load_run`, for a program that has `--help` and `--dry-run` as well; `--help` prints and exits.

    Args:
        description, program: what `--help` says of the program, and what it calls it.
    """
    parser = _Parser(prog=program or Path(sys.argv[0]).name, add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="TOPIC")
    own, rest = parser.parse_known_args(list(argv))
    if own.help is not None:
        run, _ = _split(rest, default)
        values = build(Config, _with_preset(_sections(run)))
        print(help_text(own.help, values, program=parser.prog, description=description, run=run))
        sys.exit(0)
    return Request(load_run(rest, default), own.dry_run)


def load_run(argv: Sequence[str], default: str = DEFAULT) -> Config:
    """The settings of `[RUN] [--section.key value ...]`; RUN, or `--run RUN`, is a run preset or a .toml file.

    A run without a name gets the preset's or file's and the time.

    Args:
        default: the preset or file where the arguments name none.

    Raises:
        RaypackError: unknown flag, preset or key, a value out of range, a file that cannot be read.
    """
    run, flags = _split(argv, default)
    file = _sections(run)
    if flags.get("model", {}).get("preset"):
        file.pop("model", None)  # a preset from the command line replaces the file's model, not only what that lacks
    return with_name(build(Config, _with_preset(_merge(file, flags))), Path(run).stem)


def with_name(config: Config, stem: str) -> Config:
    """A run without a name gets one: `stem`, as far as it can be part of one, and the time."""
    if config.run.name:
        return config
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem)[:100]
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _split(argv: Sequence[str], default: str) -> tuple[str, dict[str, Any]]:
    """The run preset or file, and the flags: `["--run.steps", "5"]` -> `{"run": {"steps": "5"}}`.

    `build` checks the values.
    """
    first, rest = list(argv[:1]), list(argv[1:])
    if not first or first[0].startswith("-"):
        first, rest = [], list(argv)
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--run", metavar="RUN")
    known = {setting.path: setting.description for setting in settings_of(Config)}
    for path in known:
        parser.add_argument(f"--{path}", *(f"--{short}" for short, of in SHORT.items() if of == path), dest=path)
    found, unknown = parser.parse_known_args(rest)
    if unknown:
        raise RaypackError(_unknown(unknown[0], known))
    given = vars(found)
    flags: dict[str, Any] = {}
    run = given.pop("run", "")
    if first and run:
        raise RaypackError(f"{shown(first[0])} and --run {shown(run)} both name the run: give one of them")
    run = run or (first[0] if first else default)
    for path, value in given.items():
        section, _, key = path.partition(".")
        flags.setdefault(section, {})[key] = value
    return run, flags


def _unknown(argument: str, known: dict[str, str]) -> str:
    flag = argument.partition("=")[0]
    if not flag.startswith("--"):
        return (
            f"{shown(argument)} belongs to no flag: settings are given as --section.key value (quotes around a value "
            "with spaces), a run preset or file as the first argument, or as --run RUN"
        )
    path = flag.removeprefix("--")
    near = near_miss(path, ["run", "dry-run", "help", *SHORT], 0.8) or near_setting(path, known)
    return f"unknown flag {plain(flag)}: " + did_you_mean(f"--{near}" if near else "", "a job's --help all lists all")


def _sections(run: str) -> dict[str, Any]:
    """The tables of a run preset or file. A flag laid over what is no table would drop it, so that is refused first."""
    data = preset_or_file("runs", run)
    for name in Config.model_fields:
        if not isinstance(data.get(name, {}), dict):
            build(Config, {name: data[name]})  # says what is wrong with it
    return data


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _with_preset(data: dict[str, Any]) -> dict[str, Any]:
    """Lay `[model]` over the preset it names."""
    model = data.get("model")
    if not isinstance(model, dict) or not model.get("preset"):
        return data
    preset = str(model["preset"])
    below = {"name": Path(preset).stem, **preset_or_file("models", preset)}
    return {**data, "model": {**below, **model}}
