"""Writing a corpus directory: all of it or nothing.

Everything goes into a hidden sibling directory, which takes the corpus' name at the very end, header included. A
builder that is killed leaves only that sibling; the next build at the same place removes it.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from raypack.data.corpus import FILES, HEADER_NAME, INT64, UINT8, CorpusHeader, content_fingerprint, token_type
from raypack.errors import RaypackError

LOCK_NAME = "building.lock"
ABANDONED_SECONDS = 3600.0


class Column:
    """One flat file of numbers under construction, with the running SHA-256 of what it holds."""

    def __init__(self, path: Path, kind: np.dtype[Any]) -> None:
        self.kind = kind
        self.size = 0
        self._file = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()

    def append(self, values: np.ndarray | Iterable[int]) -> None:
        data = np.asarray(values).astype(self.kind).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data) // self.kind.itemsize

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo what the body appended where it raises."""
        size, digest = self.size, self._digest.copy()
        try:
            yield
        except BaseException:
            self._file.seek(size * self.kind.itemsize)
            self._file.truncate()
            self.size, self._digest = size, digest
            raise

    def values(self) -> np.ndarray:
        """Read everything back."""
        self._file.flush()
        return np.fromfile(self._file.name, dtype=self.kind)

    def finish(self) -> bytes:
        """Bring everything to the disk; the SHA-256 of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.digest()

    def close(self) -> None:
        with suppress(OSError):  # a full disk has been reported by then
            self._file.close()


class CorpusWriter:
    """Context manager: per document append to `tokens`, then `end_document`; at last `finish`, else nothing is left.

    Args:
        out: where the corpus will be; its parents are made.
        vocabulary: of the tokenizer.
        force: replace a corpus that is there.

    Raises:
        RaypackError: `out` exists (and `force` is off or it is no corpus), or cannot be written.
    """

    def __init__(self, out: Path, vocabulary: int, *, force: bool = False) -> None:
        self.out = out.absolute()
        self.force = force
        check_output(self.out, force=force)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.out)
        self._folder = _make_sibling(self.out)
        self._lock = (self._folder / LOCK_NAME).open("wb")
        with suppress(OSError):  # a file system without locks: nobody clears up after us then
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kinds: tuple[np.dtype[Any], ...] = (token_type(vocabulary), INT64, INT64, UINT8)
        self._columns = [Column(self._folder / name, kind) for name, kind in zip(FILES, kinds, strict=True)]
        self.tokens, self._offsets, self._labels, self._holdout = self._columns
        self._offsets.append([0])

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for column in self._columns:
            column.close()
        self._lock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def documents(self) -> int:
        return self._labels.size

    def end_document(self, labels: int) -> None:
        """Close the document whose tokens were appended to `tokens`."""
        self._offsets.append([self.tokens.size])
        self._labels.append([labels])

    def document_lengths(self) -> np.ndarray:
        """int64 [documents], tokens of the documents so far."""
        return np.diff(self._offsets.values())

    def finish(self, header: dict[str, Any], held_out: np.ndarray) -> CorpusHeader:
        """Write the split (bool [documents]) and the header, and give the corpus its name.

        Args:
            header: the fields of `CorpusHeader` but documents, tokens and fingerprint.
        """
        self._holdout.append(held_out)
        digests = [column.finish() for column in self._columns]
        complete = CorpusHeader(
            **header,
            documents=self._labels.size,
            tokens=self.tokens.size,
            fingerprint=content_fingerprint(header["tokenizer"], header["vocabulary"], digests),
        )
        with (self._folder / HEADER_NAME).open("w", encoding="utf-8") as file:
            file.write(complete.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._publish()
        return complete

    def _publish(self) -> None:
        check_output(self.out, force=self.force)
        aside = None
        if self.out.exists():
            aside = _make_sibling(self.out)
            self.out.rename(aside / "old")
        try:
            self._folder.rename(self.out)
        except BaseException:
            if aside is not None and not self.out.exists():
                (aside / "old").rename(self.out)
            # Another builder may have been faster, in the moment since the first check.
            check_output(self.out, force=False)
            raise
        finally:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):
            (self.out / LOCK_NAME).unlink()


def check_output(out: Path, *, force: bool) -> None:
    """Raises RaypackError where `out` exists, unless it is a corpus and `force` allows to replace it."""
    if not out.exists() and not out.is_symlink():
        return
    if not (out / HEADER_NAME).is_file():
        raise RaypackError(f"--out {out} exists and is no corpus: choose a path that does not exist yet")
    if not force:
        raise RaypackError(f"--out {out} exists: replace it with --force, or choose another path")


def remove_abandoned(out: Path) -> None:
    """Remove what killed builders of `out` left: old siblings whose lock nobody holds."""
    for folder in out.parent.glob(f"{glob.escape(_prefix(out))}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < ABANDONED_SECONDS:
                continue
            with (folder / LOCK_NAME).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _make_sibling(out: Path) -> Path:
    folder = out.parent / f"{_prefix(out)}{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


def _prefix(out: Path) -> str:
    return f".{out.name}.building-"
