"""A sink of one's own: every step's loss and speed as a line of CSV in the run's directory.

raypack train --observe.sinks sink:Csv        # from this directory, or with it on PYTHONPATH
"""

from __future__ import annotations

from pathlib import Path

from raypack.observe.record import StepRecord
from raypack.observe.sinks import scalars

COLUMNS = ("learning/loss", "speed/tokens_per_second", "bytes/inter")


class Csv:
    """`steps.csv` of the run directory; a step that was done again stands there twice, the last line counts."""

    def __init__(self, run_dir: Path, run_name: str) -> None:
        self._file = (run_dir / "steps.csv").open("a", encoding="utf-8", buffering=1)
        if self._file.tell() == 0:
            self._file.write(",".join(["run", "step", *COLUMNS]) + "\n")
        self._run = run_name

    def update(self, record: StepRecord, replayed: bool) -> None:
        figures = scalars(record)  # what is unknown is not in it
        cells = [self._run, record.step, *(figures.get(name, "") for name in COLUMNS)]
        self._file.write(",".join(map(str, cells)) + "\n")

    def close(self) -> None:
        self._file.close()
