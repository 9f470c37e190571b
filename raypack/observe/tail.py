"""Records of a run that is still being written, by reading its file again and again."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from raypack.observe.record import StepRecord
from raypack.observe.run_files import CONFIG_FILE, ENDPOINT_FILE, STEPS_FILE


class Tail:
    """Reads on where it stopped. A last line without its end is left for the next time."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STEPS_FILE
        self._at = 0
        self._lines = 0

    def new(self) -> list[StepRecord]:
        """Records that came since the last call.

        Raises:
            RaypackError: a line is no record; it names the line.
        """
        if not self._path.exists():
            return []
        found = []
        with open(self._path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                self._lines += 1
                if line.strip():
                    text = line.decode("utf-8", "replace")  # what is no text is no record either
                    found.append(StepRecord.from_json(text, f"{self._path} line {self._lines}"))
        return found


def is_live(run_dir: Path) -> bool:
    """Whether the run's observer says that it serves; a run that was killed says so for ever."""
    try:
        return bool(json.loads((run_dir / ENDPOINT_FILE).read_text(encoding="utf-8"))["serving"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def steps_of(run_dir: Path) -> int:
    """Steps of the whole run as its settings say, 0 where they do not; settings of another version are no fault."""
    try:
        return int(tomllib.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["run"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def follow(run_dir: Path, interval: float = 0.5, quiet_max: float = 600.0) -> Iterator[list[StepRecord]]:
    """New records as they come, until the run has ended, or nothing has come for `quiet_max` seconds."""
    tail, quiet = Tail(run_dir), time.monotonic()
    while True:
        live = is_live(run_dir)  # asked first: what was written before the end is read after it
        records = tail.new()
        if records:
            quiet = time.monotonic()
            yield records
        if not live or time.monotonic() - quiet > quiet_max:
            return
        time.sleep(interval)
