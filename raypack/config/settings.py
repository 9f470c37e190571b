"""The settings as data: what each one is called, what it may be and what it means, and what is wrong with a given one.

All of it comes from the fields of the models in `raypack.config`; flags, `--help`, the reference page and error texts
are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from raypack.config.units import Named, Unit
from raypack.near_miss import did_you_mean, near_miss, near_setting


@dataclass(frozen=True)
class Setting:
    """One value that a person may set.

    Attributes:
        path: `section.key`.
        kind: what is written: integer, number, text, true or false, list of integers, list of names, or a choice.
        unit: of a number; "" for anything else.
        limits: of a number, in words; "" where there are none.
    """

    path: str
    kind: str
    choices: tuple[str, ...]
    unit: str
    limits: str
    default: Any
    description: str


def settings_of(kind: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every setting of a model and of the models in it, in the order in which they are declared."""
    for name, field in kind.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        section = _section_of(field)
        if section is not None:
            yield from settings_of(section, path)
        else:
            yield _setting(path, field)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model that a field holds; None for a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _setting(path: str, field: FieldInfo) -> Setting:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    choices = next((part.choices for part in field.metadata if isinstance(part, Named)), choices)
    unit = next((part.name for part in field.metadata if isinstance(part, Unit)), "")
    kinds: dict[Any, str] = {
        int: "integer",
        float: "number",
        bool: "true or false",
        str: "choice" if choices else "text",
        tuple[str, ...]: "list of names",
    }
    kind = kinds.get(field.annotation, "choice" if choices else "list of integers")
    return Setting(path, kind, choices, unit, _limits(field), field.get_default(), field.description or "")


def _limits(field: FieldInfo) -> str:
    """`1 to 64`, `above 0, at most 1000`: of several limits the tightest."""
    low, above = (_bound(field, name, max) for name in ("ge", "gt"))
    most, below = (_bound(field, name, min) for name in ("le", "lt"))
    if low is not None and most is not None and below is None:
        return f"{number(low)} to {number(most)}"
    parts = [("at least", low), ("above", above), ("below", below), ("at most", most if below is None else None)]
    return ", ".join(f"{word} {number(value)}" for word, value in parts if value is not None)


def _bound(field: FieldInfo, name: str, tightest: Callable[[list[Any]], Any]) -> Any:
    """Of the limits called `name` (ge, gt, le or lt) the tightest; None where there is none."""
    found = [getattr(part, name) for part in field.metadata if hasattr(part, name)]
    return tightest(found) if found else None


def number(value: Any) -> str:
    """As people read it: `2,147,483,647`, `0.003`, `1e-08`."""
    whole = isinstance(value, int) or (value == int(value) and abs(value) < 1e9)
    return f"{int(value):,}" if whole else f"{value:g}"


def first_fault(error: ValidationError, where: str = "", kind: type[BaseModel] = BaseModel) -> str:
    """The first fault of values given for a model, as one line: key, value, rule, and what was probably meant.

    Args:
        where: what the keys are below, in the texts.
        kind: the model; only with it near misses are known.
    """
    fault = error.errors()[0]
    inside = [str(part) for part in fault["loc"]]
    path = ".".join(plain(part) for part in ([where] if where else []) + inside)
    given, known = fault["input"], _fields_at(kind, inside[:-1])
    if fault["type"] == "extra_forbidden":
        return _unknown_key(kind, where, inside, path, isinstance(given, dict))
    if fault["type"] == "model_type" and inside and inside[-1] in known:
        return f"{path} = {shown(given)}: must be a section of settings, [{path}] and a key on each line below it"
    text = fault["msg"].removeprefix("Value error, ")
    text = re.sub(r"^\w+ should\b", "must", text)
    if fault["type"] == "literal_error":
        choices = get_args(known[inside[-1]].annotation) if inside[-1] in known else ()
        near = near_miss(str(given), [choice for choice in choices if choice])
        text = f"{did_you_mean(repr(near), '')} {text}" if near else text
    # A rule over several settings names them itself.
    return f"{path}: {text}" if isinstance(given, dict | BaseModel) else f"{path} = {shown(given)}: {text}"


def _fields_at(kind: type[BaseModel], inside: list[str]) -> dict[str, FieldInfo]:
    fields = dict(kind.model_fields)
    for part in inside:
        below = _section_of(fields[part]) if part in fields else None
        if below is None:
            return {}
        fields = dict(below.model_fields)
    return fields


def _unknown_key(kind: type[BaseModel], where: str, inside: list[str], path: str, table: bool) -> str:
    siblings = list(_fields_at(kind, inside[:-1]))
    if table and len(inside) == 1:
        near = near_miss(inside[0], siblings)
        meant = did_you_mean(f"[{near}]" if near else "", f"there are {', '.join(siblings)}")
        return f"unknown section [{path}]: {meant}"
    known = {setting.path: setting.description for setting in settings_of(kind, where)}
    return f"unknown key {path}: {did_you_mean(near_setting(path, known), 'there are ' + ', '.join(siblings))}"


def shown(value: Any) -> str:
    """A value as it was given, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def plain(part: str) -> str:
    """A name as it was given, without quotes where it is short and can be printed."""
    return part if part.isprintable() and len(part) <= 80 else shown(part)
