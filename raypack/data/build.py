"""Building a corpus from text: folders of text or source files, `.txt`, `.jsonl`, `.jsonl.gz`.

Text streams through in pieces: memory is bounded by 8 bytes a document and the longest `.jsonl` line.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from raypack.data.corpus import CorpusHeader
from raypack.data.inputs import NotTextError, Source, documents_of, find_sources
from raypack.data.tokenizer import Tokenizer, make_tokenizer
from raypack.data.write import CorpusWriter, check_output
from raypack.errors import RaypackError
from raypack.version import __version__

KEY_BYTES = 8


@dataclass
class _Tally:
    """Hash of each document kept; how many had no text, and how many files were no UTF-8 text."""

    keys: array[int] = field(default_factory=lambda: array("Q"))
    empty: int = 0
    binary: int = 0


def build_corpus(
    inputs: Iterable[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "byte",
    holdout: float = 0.01,
    text_field: str = "text",
    force: bool = False,
    progress: bool = True,
) -> CorpusHeader:
    """Tokenise `inputs` (files and folders) into a corpus at `out`; nothing is there until all of it is.

    Args:
        holdout: share of the documents to hold out, 0 to below 1; see `choose_holdout`.
        text_field: the key of the text in `.jsonl` lines.
        force: replace a corpus at `out`.
        progress: a bar on standard error, where that is a terminal.

    Raises:
        RaypackError: an impossible setting, an input that is missing or bad (file and line), no document in the
            inputs, an output that exists, or a full disk.
    """
    out, given = Path(out), [str(each) for each in inputs]
    check_output(out, force=force)
    return build_from_sources(
        find_sources(given, skip=out), given, out, tokenizer, holdout, text_field=text_field, force=force, bar=progress
    )


def build_from_sources(
    sources: list[Source],
    given: list[str],
    out: Path,
    tokenizer: str = "byte",
    holdout: float = 0.01,
    *,
    text_field: str = "text",
    force: bool = False,
    bar: bool = True,
) -> CorpusHeader:
    """As `build_corpus`, for files that are found already; `given` is what the header names as inputs."""
    if not 0 <= holdout < 1:
        raise RaypackError(f"--holdout {holdout}: must be a share of the documents, 0 to below 1")
    encoder = make_tokenizer(tokenizer)
    tally = _Tally()
    try:
        with CorpusWriter(out, encoder.vocabulary, force=force) as writer:
            with _reading_bar(sources, bar) as watched:
                for source, chunks in _documents(sources, text_field, watched):
                    _add_document(writer, encoder, source, chunks, tally)
            if not writer.documents:
                raise RaypackError(
                    f"no documents in {', '.join(given[:5])}: {len(sources)} files, {tally.empty} empty documents, "
                    f"{tally.binary} files that are no text; give other --input paths"
                )
            held_out = choose_holdout(np.frombuffer(tally.keys, dtype=np.uint64), holdout)
            header = {
                "tokenizer": encoder.name,
                "vocabulary": encoder.vocabulary,
                "holdout": {
                    "share": holdout,
                    "documents": int(held_out.sum()),
                    "tokens": int(writer.document_lengths()[held_out].sum()),
                },
                "provenance": {
                    "raypack": __version__,
                    "inputs": given,
                    "skipped_empty": tally.empty,
                    "skipped_binary": tally.binary,
                },
            }
            return writer.finish(header, held_out)
    except OSError as error:
        raise RaypackError(f"cannot build {out}: {error.filename or out}: {error.strerror or error}") from None


def _checked(ids: np.ndarray, encoder: Tokenizer) -> np.ndarray:
    """Raises RaypackError for an id that the vocabulary lacks: a corpus stores no wider numbers than it needs."""
    if len(ids) and not (np.min(ids) >= 0 and np.max(ids) < encoder.vocabulary):
        raise RaypackError(
            f"tokenizer {encoder.name} made ids {np.min(ids)}..{np.max(ids)}, and says that its vocabulary is "
            f"{encoder.vocabulary}: correct one of them"
        )
    return ids


def _add_document(
    writer: CorpusWriter, encoder: Tokenizer, source: Source, chunks: Iterable[str], tally: _Tally
) -> None:
    before, digest = writer.tokens.size, hashlib.blake2b(digest_size=KEY_BYTES)
    try:
        with writer.tokens.all_or_nothing():
            for ids in encoder.encode(_hashed(chunks, digest)):
                writer.tokens.append(_checked(ids, encoder))
    except NotTextError:
        if source.named:
            raise RaypackError(f"--input {source.path}: is no UTF-8 text; convert it or leave it out") from None
        tally.binary += 1
        return
    labels = writer.tokens.size - before
    if labels == 0:
        tally.empty += 1
        return
    writer.tokens.append([encoder.end_of_document])
    writer.end_document(labels)
    tally.keys.append(int.from_bytes(digest.digest(), "big"))


def _hashed(chunks: Iterable[str], digest: hashlib.blake2b) -> Iterator[str]:
    for chunk in chunks:
        digest.update(chunk.encode())
        yield chunk


Watch = Callable[[BinaryIO], BinaryIO]


def _documents(sources: list[Source], text_field: str, watched: Watch) -> Iterator[tuple[Source, Iterable[str]]]:
    for source in sources:
        with source.path.open("rb") as file:
            for chunks in documents_of(watched(file), source.path, text_field):
                yield source, chunks


@contextmanager
def _reading_bar(sources: list[Source], bar: bool) -> Iterator[Watch]:
    """A bar on standard error; the function it gives wraps each file, so that reading moves the bar."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (bar and console.is_terminal)) as progress:
        task = progress.add_task(f"{len(sources)} files", total=sum(source.size for source in sources))
        yield lambda file: progress.wrap_file(file, task_id=task)


def choose_holdout(keys: np.ndarray, share: float) -> np.ndarray:
    """The held-out documents, from one uniform uint64 key each (a hash of its text).

    A document's side depends on its text alone: not on the order of the inputs, nor on the other documents, so a
    corpus that grows keeps its split, and copies of a document are on one side. Only where that would leave a side
    without documents does the lowest key go to the held-out side, or the highest to training.

    Returns:
        bool [documents], true where held out.
    """
    held_out = keys < np.uint64(int(share * 2**64))
    if share > 0 and not held_out.any():
        held_out = keys == keys.min()
    return held_out if not held_out.all() else keys < keys.max()
