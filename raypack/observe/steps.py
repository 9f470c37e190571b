"""`steps.jsonl`: one line a step and attempt, only ever appended to; which lines count is resolved when reading.

A run that goes on is read by reading on, again and again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from raypack.errors import RaypackError
from raypack.observe.record import StepRecord
from raypack.observe.run_files import STEPS_FILE, is_live


class StepLog:
    """Appends records; each line is in the file when `update` returns."""

    def __init__(self, path: Path) -> None:
        """Raises RaypackError where the file cannot be opened."""
        try:
            _cut_torn_tail(path)
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise RaypackError(f"cannot write {path}: {error.strerror or error}; choose another run.root") from None

    def update(self, record: StepRecord, replayed: bool = False) -> None:
        self._file.write(record.compact().to_json() + "\n")

    def close(self) -> None:
        self._file.close()


def _cut_torn_tail(path: Path) -> None:
    """Drop a last line that a killed writer left without its end, so that the next line stands alone."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        end = file.seek(0, 2)
        at = end
        while at > 0:
            start = max(0, at - 65_536)
            file.seek(start)
            newline = file.read(at - start).rfind(b"\n")
            if newline >= 0:
                at = start + newline + 1
                break
            at = start
        if at < end:
            file.truncate(at)


def read_lines(path: Path) -> Iterator[StepRecord]:
    """The records as written, in file order. A last line without its end is a writer's, still at work or killed.

    Raises:
        RaypackError: the file is missing, or a line is no record; it names the line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith("\n") and line.strip():
                    yield StepRecord.from_json(line, f"{path} line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise RaypackError(f"cannot read {path}: {error}") from None


def resolve(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Mark what does not count any more, and order by (step, attempt).

    A record is effective unless a later attempt began at its step or before: that attempt went on from a checkpoint
    taken before the step, so the update is not in the weights. Of two records of one step and attempt the last wins.
    """
    by_key = {(record.step, record.attempt): record for record in records}
    firsts: dict[int, int] = {}
    for step, attempt in by_key:
        firsts[attempt] = min(step, firsts.get(attempt, step))
    valid_below: dict[int, float] = {}
    limit = float("inf")
    for attempt in sorted(firsts, reverse=True):
        valid_below[attempt] = limit
        limit = min(limit, firsts[attempt])
    return [
        by_key[key].model_copy(update={"effective": key[0] < valid_below[key[1]]}) for key in sorted(by_key)
    ]  # fmt: skip


def read_steps(run_dir: str | Path) -> list[StepRecord]:
    """All records of a run, resolved.

    Raises:
        RaypackError: no records there, or a line that is none.
    """
    path = Path(run_dir) / STEPS_FILE
    if not path.is_file():
        raise RaypackError(f"{run_dir} has no {STEPS_FILE}: give the directory of a run, e.g. runs/NAME")
    return resolve(read_lines(path))


def next_attempt(run_dir: str | Path) -> int:
    """The number for a worker group that starts now: one more than any recorded, 0 for a new run."""
    path = Path(run_dir) / STEPS_FILE
    return 1 + max((record.attempt for record in read_lines(path)), default=-1) if path.is_file() else 0


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
