"""Where checkpoints lie: a directory, or an object store behind a URL.

A checkpoint is a folder `step-00000050` with DCP's files and, written last, `state.json`.

- In a directory it is written under a name that nobody reads, renamed when every rank is done, and renamed again before
  it is removed.
- An object store renames nothing. There a checkpoint is complete when `state.json` is there, and with it every file
  that it lists; it is removed by `state.json` first. What a killed writer left is removed before the next one starts.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader, StorageWriter

from raypack.errors import RaypackError

FOLDER, STATE_FILE = "checkpoints", "state.json"
PARTIAL, OLD, PROBE = ".partial-", ".old-", ".probe-"
URL = re.compile(r"[a-z][a-z0-9+.-]*://")
NAME = re.compile(r"step-\d{8,}")


def is_url(address: str) -> bool:
    return URL.match(address) is not None


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Of a checkpoint's folder."""
    return int(name.removeprefix("step-"))


def split(address: str) -> tuple[str, str, str]:
    """Path, "?" and query of a URL; all of a directory is path."""
    return address.partition("?") if is_url(address) else (address, "", "")


class Store(ABC):
    """The checkpoints of one run. `address` opens it again, on any node.

    Methods raise OSError where the storage fails (FileNotFoundError: that file is not there).
    """

    address: str

    def names(self) -> list[str]:
        """What may be checkpoints, newest first."""
        found = [name for name in self.listed() if NAME.fullmatch(name)]
        return sorted(found, key=step_of, reverse=True)

    @abstractmethod
    def listed(self) -> list[str]:
        """Everything in the store; empty where there is no store yet."""

    @abstractmethod
    def address_of(self, name: str) -> str:
        """What `locate` takes apart."""

    @abstractmethod
    def sizes(self, name: str) -> dict[str, int]:
        """Bytes of each file of a checkpoint."""

    @abstractmethod
    def read(self, name: str) -> str:
        """`state.json` of a checkpoint."""

    @abstractmethod
    def reader(self, name: str) -> StorageReader: ...

    @abstractmethod
    def prepare(self, name: str) -> None:
        """Room for a new checkpoint, and nothing left of writers that were killed. One rank, before all write."""

    @abstractmethod
    def writer(self, name: str) -> StorageWriter: ...

    @abstractmethod
    def written(self, name: str) -> dict[str, int]:
        """Bytes of each file that `writer` has put there."""

    @abstractmethod
    def publish(self, name: str, state: str) -> None:
        """Make what was written the checkpoint `name`, in place of an older one of that name."""

    @abstractmethod
    def discard(self, name: str) -> None:
        """Drop what was written, unless it was published."""

    @abstractmethod
    def remove(self, name: str) -> None: ...

    @abstractmethod
    def probe(self, name: str) -> None:
        """Write a small file, as far as it takes to know that checkpoints can be written."""

    @abstractmethod
    def unprobe(self, name: str) -> None: ...

    def prune(self, keep: int, spare: str) -> None:
        """Remove all but the `keep` newest; never `spare`."""
        for name in self.names()[keep:]:
            if name != spare:
                self.remove(name)

    @contextmanager
    def probed(self) -> Iterator[str]:
        """Prove that checkpoints can be written here; yields the name of a file that is there meanwhile.

        Raises:
            RaypackError: they cannot.
        """
        name = PROBE + uuid.uuid4().hex
        try:
            self.probe(name)
        except OSError as error:
            raise RaypackError(
                f"cannot write checkpoints to {self.address}: {reason(error)}; choose another train.checkpoint_root"
            ) from None
        try:
            yield name
        finally:
            self.unprobe(name)


def reason(error: OSError) -> str:
    """One line of an OSError, of Python's or of pyarrow's."""
    return " ".join((error.strerror or str(error)).split())[:300]


class LocalStore(Store):
    """A directory, shared by all nodes."""

    def __init__(self, root: Path) -> None:
        self.root, self.address = root, str(root)

    def listed(self) -> list[str]:
        return [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []

    def address_of(self, name: str) -> str:
        return str(self.root / name)

    def sizes(self, name: str) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in sorted((self.root / name).iterdir())}

    def read(self, name: str) -> str:
        return (self.root / name / STATE_FILE).read_text(encoding="utf-8")

    def reader(self, name: str) -> StorageReader:
        return FileSystemReader(self.root / name)

    def prepare(self, name: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.listed():
            if leftover.startswith((PARTIAL, OLD)):
                shutil.rmtree(self.root / leftover)
        self._partial(name).mkdir()

    def writer(self, name: str) -> StorageWriter:
        return FileSystemWriter(self._partial(name))

    def written(self, name: str) -> dict[str, int]:
        return self.sizes(PARTIAL + name)

    def publish(self, name: str, state: str) -> None:
        with open(self._partial(name) / STATE_FILE, "w", encoding="utf-8") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        if (self.root / name).exists():
            self.remove(name)
        os.replace(self._partial(name), self.root / name)

    def discard(self, name: str) -> None:
        shutil.rmtree(self._partial(name), ignore_errors=True)

    def remove(self, name: str) -> None:
        gone = self.root / (OLD + name)
        os.replace(self.root / name, gone)
        shutil.rmtree(gone)

    def probe(self, name: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / name).touch()

    def unprobe(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def _partial(self, name: str) -> Path:
        return self.root / (PARTIAL + name)
