"""Where a corpus' documents come from: finding the files, and reading each kind of file as a stream of documents.

A new kind of input (Parquet, ...) is a reader with an entry in `READERS`, chosen by the end of the file's name; any
other file is read as one document of text.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from raypack.errors import RaypackError

CHUNK_BYTES = 1 << 20

Reader = Callable[[BinaryIO, Path, str], Iterator[Iterable[str]]]
"""(file, its path for messages, the text field) -> documents, each its text in pieces."""


class NotTextError(Exception):
    """A file that is no UTF-8 text; found while its pieces are read."""


@dataclass(frozen=True)
class Source:
    """One file to read. `named`: given by the user itself, not found in a folder; then it has to be text."""

    path: Path
    size: int
    named: bool = False


def find_sources(inputs: Iterable[str | Path], skip: Path | None = None) -> list[Source]:
    """The regular files of `inputs` in the order given, a folder's (all below it) by path; none twice.

    In folders, hidden entries, `__pycache__`, symbolic links to folders, and the folder `skip` are left out.

    Raises:
        RaypackError: an input that is missing, unreadable or neither file nor folder.
    """
    found: dict[Path, Source] = {}
    for each in inputs:
        path = Path(each)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise RaypackError(f"--input {path}: {error.strerror}; give files or folders of text") from None
        if stat.S_ISDIR(mode):
            for source in sorted(_walk(path, skip), key=lambda each: each.path):
                found.setdefault(source.path.absolute(), source)
        elif stat.S_ISREG(mode):
            found[path.absolute()] = Source(path, path.stat().st_size, named=True)
        else:
            raise RaypackError(f"--input {path}: is neither a file nor a folder; give files or folders of text")
    return list(found.values())


def _walk(folder: Path, skip: Path | None) -> Iterator[Source]:
    def unreadable(error: OSError) -> None:
        raise RaypackError(f"cannot read folder {error.filename}: {error.strerror}; leave it out or give access")

    skip = skip.resolve() if skip else None
    for here, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = [f for f in folders if not _left_out(f) and (Path(here) / f).resolve() != skip]
        for name in files:
            path = Path(here) / name
            if not _left_out(name) and path.is_file():  # no socket, pipe, device or dead link
                yield Source(path, path.stat().st_size)


def _left_out(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def documents_of(file: BinaryIO, path: Path, field: str) -> Iterator[Iterable[str]]:
    """The documents of one open file, each as pieces of text to be read in turn before the next document.

    Raises (while reading):
        NotTextError: the file should be text and is not.
        RaypackError: a bad line of a `.jsonl` file, by file and line number.
    """
    reader = next((reader for suffix, reader in READERS.items() if path.name.lower().endswith(suffix)), _read_text)
    return reader(file, path, field)


def _read_text(file: BinaryIO, path: Path, field: str) -> Iterator[Iterable[str]]:
    yield _text_chunks(file)


def _text_chunks(file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        data = file.read(CHUNK_BYTES)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError:
            raise NotTextError from None
        # Valid UTF-8, but no text editor writes it: the mark of a binary file.
        if "\0" in text:
            raise NotTextError
        if text:
            yield text
        if not data:
            return


def _read_jsonl(file: BinaryIO, path: Path, field: str) -> Iterator[Iterable[str]]:
    for number, line in enumerate(file, 1):
        if not line.isspace():
            yield (_text_of(line, f"{path}, line {number}", field),)


def _read_jsonl_gz(file: BinaryIO, path: Path, field: str) -> Iterator[Iterable[str]]:
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield from _read_jsonl(unpacked, path, field)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RaypackError(f"{path}: is no complete gzip file ({error}); compress it again") from None


def _text_of(line: bytes, where: str, field: str) -> str:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RaypackError(f"{where}: is not JSON ({error}); each line is one object with the text") from None
    if not isinstance(row, dict):
        raise RaypackError(f"{where}: is of type {type(row).__name__}, not an object with the key {field!r}")
    if field not in row:
        keys = ", ".join(sorted(row)[:8])
        raise RaypackError(f"{where}: has no key {field!r} (keys: {keys}); name the text's key with --text-field")
    text = row[field]
    if not isinstance(text, str):
        raise RaypackError(f"{where}: {field!r} is of type {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RaypackError(f"{where}: {field!r} has half a surrogate pair, which is no text; mend the line") from None
    return text


READERS: dict[str, Reader] = {".jsonl": _read_jsonl, ".jsonl.gz": _read_jsonl_gz}
