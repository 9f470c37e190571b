"""Checkpoints behind a URL, and torch's distributed checkpoint over the `pyarrow.fs` that opens it."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pyarrow
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan, StorageReader, StorageWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase

from raypack.checkpoint.storage import STATE_FILE, Store, split
from raypack.errors import RaypackError

# They have no directories; pyarrow would write an empty object in place of each.
WITHOUT_DIRECTORIES = ("s3", "gcs")
# Bytes of one request at least: small tensors lie side by side, and a request takes as long as a MB or two.
READ_AHEAD = 2**20


class ObjectStore(Store):
    """A URL that `pyarrow.fs` opens: `s3://bucket/prefix?region=..`, `gs://`, `abfss://`, `hdfs://`, `file:///`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._base, mark, query = split(address)
        self._query = mark + query
        try:
            self.fs, path = FileSystem.from_uri(address)
        except (OSError, pyarrow.ArrowException, ValueError) as error:
            raise RaypackError(
                f"{address} is no storage that checkpoints can go to: {' '.join(str(error).split())}; give a directory "
                "or a URL such as s3://bucket/prefix"
            ) from None
        self.path = path.rstrip("/")
        if not self.path:
            raise RaypackError(f"{address} names no place in its storage: give a URL such as s3://bucket/prefix")

    def listed(self) -> list[str]:
        return [info.base_name for info in self._infos(self.path)]

    def address_of(self, name: str) -> str:
        return f"{self._base.rstrip('/')}/{name}{self._query}"

    def sizes(self, name: str) -> dict[str, int]:
        return {info.base_name: info.size for info in self._infos(self._at(name)) if info.is_file}

    def read(self, name: str) -> str:
        with self.fs.open_input_file(self._at(name, STATE_FILE)) as file:
            return bytes(file.read()).decode()

    def reader(self, name: str) -> StorageReader:
        return ArrowReader(self.fs, self._at(name))

    def prepare(self, name: str) -> None:
        for other in self.names():
            if other == name or STATE_FILE not in self.sizes(other):
                self.remove(other)

    def writer(self, name: str) -> StorageWriter:
        return ArrowWriter(self.fs, self._at(name))

    def written(self, name: str) -> dict[str, int]:
        return self.sizes(name)

    def publish(self, name: str, state: str) -> None:
        with self.fs.open_output_stream(self._at(name, STATE_FILE)) as file:
            file.write(state.encode())

    def discard(self, name: str) -> None:
        if STATE_FILE not in self.sizes(name):
            self.remove(name)

    def remove(self, name: str) -> None:
        if STATE_FILE in self.sizes(name):
            self.fs.delete_file(self._at(name, STATE_FILE))
        with suppress(FileNotFoundError):
            self.fs.delete_dir(self._at(name))

    def probe(self, name: str) -> None:
        ArrowFiles(self.fs).mkdir(self.path)
        with self.fs.open_output_stream(self._at(name)) as file:
            file.write(b"raypack")

    def unprobe(self, name: str) -> None:
        self.fs.delete_file(self._at(name))

    def _at(self, *names: str) -> str:
        return "/".join((self.path, *names))

    def _infos(self, path: str) -> list[FileInfo]:
        return self.fs.get_file_info(FileSelector(path, allow_not_found=True))


class ArrowFiles(FileSystemBase):
    """What DCP asks of a file system, answered by pyarrow. Paths are without the scheme."""

    def __init__(self, fs: FileSystem) -> None:
        self.fs = fs

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        name = os.fspath(path)
        if "r" in mode:
            with self.fs.open_input_file(name) as stream:
                yield io.BufferedReader(cast(io.RawIOBase, stream), READ_AHEAD)
            return
        with self.fs.open_output_stream(name) as stream:
            yield cast(io.IOBase, stream)

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        self.fs.move(os.fspath(path), os.fspath(new_path))

    def init_path(self, path: str | os.PathLike) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        if self.fs.type_name not in WITHOUT_DIRECTORIES:
            self.fs.create_dir(os.fspath(path), recursive=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def exists(self, path: str | os.PathLike) -> bool:
        return self.fs.get_file_info(os.fspath(path)).type != FileType.NotFound

    def rm_file(self, path: str | os.PathLike) -> None:
        with suppress(FileNotFoundError):
            self.fs.delete_file(os.fspath(path))


class ArrowWriter(FileSystemWriter):
    """Writes one file a rank. Their names differ from save to save: what a writer that was thought dead still sends
    later never gets into another one's checkpoint."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        # DCP would sync the whole machine's disks for a stream without a file number.
        super().__init__(path, sync_files=False)
        self.fs, self.path = ArrowFiles(fs), path  # type: ignore[assignment]

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        token = uuid.uuid4().hex[:12]
        named = []
        for rank, plan in enumerate(super().prepare_global_plan(plans)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{token}-{rank}-")
            named.append(dataclasses.replace(plan, storage_data=prefix))
        return named


class ArrowReader(FileSystemReader):
    """Reads the ranges that a rank needs: a large tensor with one request, small neighbours together."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        super().__init__(path)
        self.fs, self.path = ArrowFiles(fs), path  # type: ignore[assignment]

    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))
