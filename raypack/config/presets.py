"""Settings from files: presets by name, TOML, and what is wrong with them in one line."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from raypack.config.cluster import ClusterConfig
from raypack.config.model import ModelConfig
from raypack.config.settings import first_fault, shown
from raypack.errors import RaypackError
from raypack.near_miss import did_you_mean, near_miss

T = TypeVar("T", bound=BaseModel)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Raises RaypackError where the file is missing or no TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RaypackError(f"cannot read {shown(str(path))}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also a NUL in the path, and bytes that are no UTF-8
        raise RaypackError(f"cannot read {shown(str(path))}: {error}") from None


Kind = Literal["models", "clusters", "runs"]


def preset_names(kind: Kind) -> list[str]:
    folder = resources.files("raypack.presets").joinpath(kind)
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def preset_or_file(kind: Kind, name: str) -> dict[str, Any]:
    """The TOML of a shipped preset, or of a file where `name` ends in .toml."""
    if name.endswith(".toml"):
        return read_toml(name)
    there = preset_names(kind)
    if name not in there:
        meant = did_you_mean(near_miss(name, there), "")
        raise RaypackError(
            f"no {kind[:-1]} preset {shown(name)}: {meant} there are {', '.join(there)}, or give a .toml file"
        )
    return tomllib.loads(resources.files("raypack.presets").joinpath(kind, f"{name}.toml").read_text(encoding="utf-8"))


def load_model(name: str, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """A model preset or TOML file, with single fields replaced."""
    data = {"name": Path(name).stem, **preset_or_file("models", name), **(overrides or {})}
    return build(ModelConfig, data, "model")


def load_cluster(name: str, overrides: dict[str, Any] | None = None) -> ClusterConfig:
    """A cluster preset or TOML file, with single fields replaced."""
    data = {"name": Path(name).stem, **preset_or_file("clusters", name), **(overrides or {})}
    return build(ClusterConfig, data, "cluster")


def build(kind: type[T], data: dict[str, Any], where: str = "") -> T:
    """Construct a settings model; the first fault becomes one line that names the key, the value and the rule."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise RaypackError(first_fault(error, where, kind)) from None
