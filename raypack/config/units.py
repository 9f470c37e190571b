"""What settings are made of: sections, and types of which each says its unit and its limits.

No number, name or path is larger than anything behind it can take. An upper limit here is no advice:
it is where a typing error (`1e400`, twenty digits) is answered at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from raypack.registry import FOREIGN, unknown


class Section(BaseModel):
    """What all settings are: frozen, closed to unknown keys, strict about nonsense."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Unit:
    """What a number counts, for `--help` and the reference page; "" where it is a bare number."""

    name: str


@dataclass(frozen=True)
class Named:
    """Of text, or of each text in a list: one of `known`, or `package.module:object`. Only its form is checked."""

    known: tuple[str, ...]

    @property
    def choices(self) -> tuple[str, ...]:
        return (*self.known, FOREIGN)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, given: Any) -> Any:
        for name in (given,) if isinstance(given, str) else given:
            if fault := unknown(name, self.known):
                raise ValueError(fault)
        return given


# The square of a sample's length must fit into 64 bits.
Tokens = Annotated[int, Unit("tokens"), Field(le=2**31 - 1)]
Steps = Annotated[int, Unit("steps"), Field(le=10**9)]
Seconds = Annotated[float, Unit("seconds"), Field(le=1e8)]
Ranks = Annotated[int, Unit("ranks"), Field(le=8192)]
Nodes = Annotated[int, Unit("nodes"), Field(le=8192)]
Layers = Annotated[int, Unit("layers"), Field(le=10_000)]
Features = Annotated[int, Unit("features"), Field(le=2**20)]
Heads = Annotated[int, Unit("heads"), Field(le=4096)]
Experts = Annotated[int, Unit("experts"), Field(le=65_536)]
Share = Annotated[float, Unit("share"), Field(le=1)]
"""A part of something, 0 to 1."""
Plain = Annotated[float, Unit("")]
Seed = Annotated[int, Unit(""), Field(ge=0, le=2**32 - 1)]
BytesPerSecond = Annotated[float, Unit("bytes/s"), Field(ge=1, le=1e18)]
FlopsPerSecond = Annotated[float, Unit("FLOP/s"), Field(ge=1, le=1e24)]

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
HOST = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,20}|[0-9A-Fa-f:.]{2,45}(%\w{1,20})?")


def _directory_name(name: str) -> str:
    if name and not NAME.fullmatch(name):
        raise ValueError(
            "must be 1 to 200 of the letters a-z and A-Z, digits, '.', '_' and '-', and not begin with a dot"
        )
    return name


def _location(path: str) -> str:
    if not path.isprintable():
        raise ValueError("holds what is no printable letter, or bytes that are no UTF-8: rename it")
    longest = max(len(part.encode()) for part in path.split("/"))
    if longest > 255:
        raise ValueError(f"has a name of {longest} bytes between its slashes, file systems allow 255")
    if len(path) > 4000:
        raise ValueError(f"has {len(path)} letters, file systems allow 4,000")
    return path


def _directory(path: str) -> str:
    if "://" in path:
        raise ValueError("must be a directory; only checkpoints can go to a URL (train.checkpoint_root)")
    return path


def _host(address: str) -> str:
    if not HOST.fullmatch(address):
        raise ValueError("must be an IP address or a host's name")
    return address


def _title(text: str) -> str:
    if len(text) > 200 or not text.isprintable():
        raise ValueError("must be one line of at most 200 printable characters")
    return text


def _listed(given: object) -> object:
    """`[2, 6]`, `2,6` or `2 6`, as a command line gives it, as a list; `["a", "b"]` likewise."""
    if isinstance(given, str):
        return re.findall(r"[^\s,\"']+", given.strip().removeprefix("[").removesuffix("]"))
    return given


DirectoryName = Annotated[str, AfterValidator(_directory_name)]
Location = Annotated[str, AfterValidator(_location)]
"""A path, URL or network address."""
Directory = Annotated[Location, AfterValidator(_directory)]
Host = Annotated[str, AfterValidator(_host)]
Title = Annotated[str, AfterValidator(_title)]
"""What tables call something."""
RanksOfNodes = Annotated[tuple[Ranks, ...], BeforeValidator(_listed), Unit("ranks"), Field(max_length=8192)]
NameList = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(max_length=100)]
"""Wants a `Named` around it."""
