"""What a mistyped name was probably meant to be. Everything that refuses a name of a closed list asks here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def near_miss(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The one of `known` that looks most like `given`, whatever the case; "" where none is near."""
    names = {name.lower(): name for name in known}
    return next((names[found] for found in get_close_matches(given.lower(), names, n=1, cutoff=cutoff)), "")


def near_setting(path: str, known: Mapping[str, str]) -> str:
    """As `near_miss`, for `section.key`.

    A key that is right but for its section is found too, and one that says what a setting is described as
    (`train.learning_rate` for `train.lr`).

    Args:
        known: description of each `section.key`.
    """
    ends: dict[str, str] = {}
    for name in known:
        ends.setdefault(_end(name), name)
    if _end(path) in ends:
        return ends[_end(path)]
    if found := near_miss(path, known, 0.85):  # most of a long path is its section, so a lower bar finds anything
        return found
    if found := near_miss(_end(path), ends, 0.8):
        return ends[found]
    words = " ".join(re.findall(r"[a-z0-9]+", _end(path).lower()))
    described = (name for name, text in known.items() if re.search(rf"\b{words}\b", text.lower()))
    return next(described, "") if len(words) > 3 else ""


def did_you_mean(name: str, instead: str) -> str:
    """The end of a sentence: the near miss where there is one, else `instead`."""
    return f"did you mean {name}?" if name else instead


def _end(path: str) -> str:
    return path.rpartition(".")[2]
