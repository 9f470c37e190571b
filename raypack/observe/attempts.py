"""`attempts.jsonl`: one line for each thing that happened to the worker groups of a run, only ever appended to.

The controller writes it, beside the records: when a group started, at what size, when and why it ended, and what the
ranks were doing then. Rank 0 adds what it goes on from, the observer which checkpoints could not be written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from raypack.config import Section

ATTEMPTS_FILE = "attempts.jsonl"
Kind = Literal["started", "resumed", "asked", "unsaved", "ended"]


class AttemptEvent(Section):
    """`time` in seconds since the epoch; `world` = ranks; `reason` = why it ended, was asked to leave or could not
    save, or the checkpoint that it goes on from; `ranks` = where they were when it ended."""

    event: Kind
    attempt: int
    time: float
    world: int = 0
    reason: str = ""
    ranks: dict[int, str] = Field(default_factory=dict)


class AttemptLog:
    """Appends; a disk that is full must not end a run that could go on."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ATTEMPTS_FILE

    def add(self, event: Kind, attempt: int, **more: Any) -> None:
        line = AttemptEvent(event=event, attempt=attempt, time=time.time(), **more).model_dump_json()
        with suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_attempts(run_dir: str | Path) -> list[AttemptEvent]:
    """The events of a run in their order; none where it left no file. Lines that are no event are passed over."""
    return list(_events(Path(run_dir) / ATTEMPTS_FILE))


def ends_of(run_dir: str | Path) -> dict[int, str]:
    """Why each attempt ended, as far as it is on file."""
    return {event.attempt: event.reason for event in read_attempts(run_dir) if event.event == "ended"}


def sentence(event: AttemptEvent) -> str:
    """What a person who watches the run reads."""
    if event.event == "started":
        return f"attempt {event.attempt} starts with {event.world} ranks"
    if event.event == "resumed":
        return f"attempt {event.attempt} goes on from {event.reason}"
    if event.event == "unsaved":
        return f"attempt {event.attempt} could not save: {event.reason}"
    if event.event == "asked":
        return f"attempt {event.attempt} saves and leaves: {event.reason}"
    return f"attempt {event.attempt} ended: {event.reason}"


def last_reason(run_dir: str | Path) -> str:
    """Why the last worker group ended; "" where that is not on file."""
    events = read_attempts(run_dir)
    last = max((event.attempt for event in events), default=-1)
    return next((e.reason for e in reversed(events) if e.event == "ended" and e.attempt == last), "")


def _events(path: Path) -> Iterator[AttemptEvent]:
    with suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValidationError):
                yield AttemptEvent.model_validate_json(line)
