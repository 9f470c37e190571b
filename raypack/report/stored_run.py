"""What the directory of a run holds, read as it goes on, after it ended, or after it was killed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from raypack.files import read_text
from raypack.observe.attempts import ends_of
from raypack.observe.record import StepRecord
from raypack.observe.run_files import CONFIG_FILE
from raypack.observe.steps import read_steps
from raypack.observe.summary import Summary, read_summary, summarise


@dataclass(frozen=True)
class StoredRun:
    """A run as it is on disk.

    Attributes:
        records: resolved (`steps.resolve`).
        summary: of them; stop reason and notes from `summary.json`, where the run left one.
        config: the text of its `config.toml`, "" where there is none.
    """

    folder: Path
    records: list[StepRecord]
    summary: Summary
    config: str

    @property
    def name(self) -> str:
        return self.summary.run

    @classmethod
    def read(cls, folder: str | Path) -> StoredRun:
        """Raises RaypackError for no run there, or files that are none of a run's."""
        folder = Path(folder)
        records, left = read_steps(folder), read_summary(folder)
        # A directory's name need not be text, but pages and JSON are.
        name = left.run if left else os.fsencode(folder.resolve().name).decode("utf-8", "backslashreplace")
        reason, notes = (left.stop_reason, left.notes) if left else ("", [])
        summary = summarise(records, name, reason, notes, ends_of(folder))
        config = folder / CONFIG_FILE
        return cls(folder, records, summary, read_text(config) if config.is_file() else "")
