"""The layer kinds there are: those of this package, and those that a model names (`model.own_layers`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from raypack.config import ModelConfig
from raypack.errors import RaypackError
from raypack.layers.full.kind import FULL
from raypack.layers.kind import LayerKind
from raypack.layers.linear.kind import LINEAR
from raypack.layers.window.kind import WINDOW
from raypack.registry import resolve

SHIPPED = (FULL, WINDOW, LINEAR)


@lru_cache(maxsize=64)
def kinds_of(model: ModelConfig) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers: those at the parent first, then in the order of `SHIPPED`, then the model's own.

    Raises:
        RaypackError: a name in `model.own_layers` of no kind, or of one that is called by another letter.
    """
    known = {kind.letter: kind for kind in SHIPPED}
    for letter, name in model.own_kinds.items():
        known[letter] = _own_kind(letter, name)
    found = [kind for letter, kind in known.items() if letter in model.kinds]
    return tuple(sorted(found, key=lambda kind: kind.at != "parent"))


def kind_of(model: ModelConfig, letter: str) -> LayerKind:
    """The kind of a letter of the model's pattern."""
    return next(kind for kind in kinds_of(model) if kind.letter == letter)


@cache
def host_plan_of(kind: LayerKind) -> Callable[[Any], Any]:
    """The kind's host plan.

    Raises:
        RaypackError: its name leads nowhere.
    """
    found: Callable[[Any], Any] = resolve(kind.host_plan, {}, f"layer kind {kind.letter}")
    return found


def _own_kind(letter: str, name: str) -> LayerKind:
    kind: LayerKind = resolve(
        name, {}, "model.own_layers", lambda found: isinstance(found, LayerKind), "a LayerKind (raypack.layers.kind)"
    )
    if kind.letter != letter:
        raise RaypackError(
            f"model.own_layers: {name} calls itself {kind.letter!r}, not {letter!r}: name it by its letter"
        )
    return kind
