"""Settings of a run from defaults, a TOML run file and `--section.key value`, in this order of precedence."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from raypack.config import Config, build, preset_or_file, read_toml
from raypack.errors import RaypackError

SHORT = {"observe.trace": "trace"}
"""Flags that have a short name too."""


class _Flags(Config, BaseSettings):
    """The same tree, as command-line flags."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")


def load_run(argv: Sequence[str], default: str | Path, description: str = "") -> Config:
    """The settings of `job.py [--run FILE.toml] [--section.key value ...]`; `--help` prints all flags and exits.

    A run without a name gets the run file's and the time.

    Args:
        default: run file used where `--run` names none.

    Raises:
        RaypackError: unknown flag or key, a value out of range, a file that cannot be read.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--run", metavar="FILE", default=str(default))
    try:
        named, rest = first.parse_known_args(list(argv))
    except argparse.ArgumentError:
        raise RaypackError("--run: needs the path of a TOML run file") from None
    if {"-h", "--help"} & set(rest):
        defaults = build(Config, _with_preset(read_toml(named.run)))
        _help(description or f"Run file: --run FILE.toml (default {named.run}). Flags override it.", defaults)
    file, flags = read_toml(named.run), _flags(rest)
    if flags.get("model", {}).get("preset"):
        file.pop("model", None)  # a preset from the command line replaces the file's model, not only what that lacks
    config = build(Config, _with_preset(_merge(file, flags)))
    if config.run.name:
        return config
    name = f"{Path(named.run).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _flags(arguments: Sequence[str]) -> dict[str, Any]:
    """`["--run.steps", "5"]` -> `{"run": {"steps": "5"}}`; values are checked later, with the file's."""
    try:
        source: Any = CliSettingsSource(
            _Flags, cli_parse_args=list(arguments), cli_exit_on_error=False, cli_avoid_json=True, cli_shortcuts=SHORT
        )
        found: dict[str, Any] = source()
    except SettingsError as error:
        text = str(error).removeprefix("error parsing CLI: ")
        raise RaypackError(f"{text}: see --help for the known flags") from None
    return found


def _help(description: str, defaults: Config) -> None:
    class Flags(_Flags):
        __doc__ = description

    for name in Config.model_fields:
        Flags.model_fields[name].default = getattr(defaults, name)
    Flags.model_rebuild(force=True)
    CliSettingsSource(Flags, cli_parse_args=["--help"], cli_avoid_json=True, cli_shortcuts=SHORT)


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
