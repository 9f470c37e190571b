"""A corpus on disk: tokenised documents with random access to any token range of any document.

A directory of

- `corpus.json`: the header (`CorpusHeader`), written last;
- `tokens.bin`: all documents' tokens end to end, little-endian, in the smallest unsigned type for the vocabulary;
- `offsets.bin`: int64 [documents + 1], first token of each document, and the total;
- `labels.bin`: int64 [documents], tokens of each document that carry a label: all but the last (no masks yet);
- `holdout.bin`: uint8 [documents], 1 where the document is held out.

Files are data: raw arrays and JSON, nothing is ever unpickled. Other formats come in as other classes with the
`Documents` protocol; stream, loader and held-out set know only that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field

from raypack.config import Section, build
from raypack.errors import RaypackError

FORMAT = "raypack-corpus"
VERSION = 1
HEADER_NAME = "corpus.json"
FILES = ("tokens.bin", "offsets.bin", "labels.bin", "holdout.bin")
INT64 = np.dtype("<i8")
UINT8 = np.dtype("u1")

Split = Literal["train", "holdout"]


class Documents(Protocol):
    """What training reads from a corpus, whatever its format."""

    vocabulary: int
    fingerprint: str

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents], tokens."""
        ...

    @property
    def labels(self) -> np.ndarray:
        """int64 [documents], labels: as many as `load_rows` gives, all tokens but the last."""
        ...

    def documents(self, split: Split) -> np.ndarray:
        """int64 indices of the documents of a split, ascending."""
        ...

    def tokens(self, document: int, lo: int, hi: int) -> np.ndarray:
        """Token ids [lo, hi) of a document, reading no others."""
        ...


class HoldoutInfo(Section):
    """What the split by document came to."""

    share: float = Field(ge=0, lt=1, description="asked for, of the documents")
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)


class Provenance(Section):
    """Where the documents came from; takes no part in the fingerprint."""

    raypack: str = Field(description="version that built the corpus")
    inputs: tuple[str, ...] = Field(description="as they were given")
    skipped_empty: int = Field(ge=0, description="documents without text")
    skipped_binary: int = Field(ge=0, description="files that are no UTF-8 text")


class CorpusHeader(Section):
    """The content of `corpus.json`."""

    format: str = FORMAT
    version: int = VERSION
    tokenizer: str
    vocabulary: int = Field(ge=1, le=2**32, description="token ids are below this")
    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)
    fingerprint: str = Field(pattern="^[0-9a-f]{64}$", description="`content_fingerprint` of the files")
    holdout: HoldoutInfo
    provenance: Provenance

    @property
    def token_type(self) -> np.dtype[Any]:
        return token_type(self.vocabulary)

    @property
    def file_bytes(self) -> dict[str, int]:
        """The exact size of every file."""
        return {
            "tokens.bin": self.tokens * self.token_type.itemsize,
            "offsets.bin": (self.documents + 1) * INT64.itemsize,
            "labels.bin": self.documents * INT64.itemsize,
            "holdout.bin": self.documents * UINT8.itemsize,
        }


class Corpus:
    """A memory-mapped corpus (protocol `Documents`). Pickling one keeps its path, not its content."""

    def __init__(self, path: Path, header: CorpusHeader) -> None:
        self.path = path
        self.header = header
        self.vocabulary = header.vocabulary
        self.fingerprint = header.fingerprint
        self._tokens = self._map("tokens.bin", header.token_type)
        self._offsets = self._map("offsets.bin", INT64)
        self._labels = self._map("labels.bin", INT64)
        self._holdout = self._map("holdout.bin", UINT8)

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Open a corpus in time that does not depend on its size: the header and the files' sizes are checked.

        Raises:
            RaypackError: no corpus there, one of another version or format, or files that disagree with the header.
        """
        path = Path(path).absolute()
        header = _read_header(path)
        for name, expected in header.file_bytes.items():
            try:
                size = (path / name).stat().st_size
            except OSError as error:
                raise RaypackError(f"corpus {path}: {name}: {error.strerror}; build the corpus again") from None
            if size != expected:
                raise RaypackError(
                    f"corpus {path}: {name} has {size} bytes, its header says {expected}: the corpus is truncated or "
                    "mixed from two; build it again"
                )
        try:
            corpus = cls(path, header)
        except OSError as error:
            raise RaypackError(f"corpus {path}: cannot be read: {error.strerror}") from None
        if corpus._offsets[0] != 0 or corpus._offsets[-1] != header.tokens:
            raise _damaged(path, "its offsets do not span its tokens")
        return corpus

    def __len__(self) -> int:
        """Number of documents, both splits."""
        return self.header.documents

    def __reduce__(self) -> tuple[Callable[[Path], Corpus], tuple[Path]]:
        return Corpus.open, (self.path,)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [documents]: tokens of each document, the end-of-document token included."""
        lengths = np.diff(self._offsets)
        if lengths.min() < 1:
            raise _damaged(self.path, f"document {lengths.argmin()} has {lengths.min()} tokens")
        return _frozen(lengths)

    @cached_property
    def labels(self) -> np.ndarray:
        """int64 [documents]: labels of each document: every token has one, the next token, but the last.

        This version of the format can't say which labels are masked, and they would be trained on: other counts are
        refused.
        """
        labels = np.array(self._labels)
        wrong = np.flatnonzero(labels != self.lengths - 1)
        if len(wrong):
            first = wrong[0]
            raise _damaged(
                self.path,
                f"document {first} has {self.lengths[first]} tokens and {labels[first]} labels (labels.bin), and must "
                f"have {self.lengths[first] - 1}, since version {VERSION} has no masks",
            )
        return _frozen(labels)

    def documents(self, split: Split) -> np.ndarray:
        """int64 indices of the documents of a split, ascending."""
        return np.flatnonzero((self._holdout != 0) == (split == "holdout")).astype(np.int64)

    def tokens(self, document: int, lo: int, hi: int) -> np.ndarray:
        """Token ids [lo, hi) of `document`, in the corpus' own unsigned type; only these are read.

        Raises:
            RaypackError: a document or range that is not there, or a damaged corpus.
        """
        if not 0 <= document < len(self):
            raise RaypackError(f"corpus {self.path}: document {document}: must lie in 0..{len(self) - 1}")
        first, end = int(self._offsets[document]), int(self._offsets[document + 1])
        if not 0 <= lo <= hi <= end - first:
            raise RaypackError(
                f"corpus {self.path}: tokens [{lo}, {hi}) of document {document}, which has {end - first}"
            )
        ids = np.array(self._tokens[first + lo : first + hi])
        if ids.size and int(ids.max()) >= self.vocabulary:
            raise _damaged(self.path, f"document {document} has token id {ids.max()} of {self.vocabulary}")
        return ids

    def verify(self) -> None:
        """Read everything and compare it with the fingerprint; takes as long as reading the corpus.

        Raises:
            RaypackError: the content is not what was built.
        """
        digests = []
        for name in FILES:
            with (self.path / name).open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").digest())
        if content_fingerprint(self.header.tokenizer, self.vocabulary, digests) != self.fingerprint:
            raise _damaged(self.path, "its content differs from its fingerprint")

    def _map(self, name: str, kind: np.dtype[Any]) -> np.ndarray:
        return np.memmap(self.path / name, dtype=kind, mode="r")


def check_vocabulary(corpus: Documents, vocabulary: int) -> None:
    """Raises RaypackError where `corpus` may hold token ids that a model of `vocabulary` ids does not know."""
    if corpus.vocabulary > vocabulary:
        raise RaypackError(
            f"model.vocabulary = {vocabulary}: the corpus has token ids up to {corpus.vocabulary - 1}; "
            f"set model.vocabulary to {corpus.vocabulary} or more, or give another corpus"
        )


def token_type(vocabulary: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id, little-endian."""
    return np.min_scalar_type(vocabulary - 1).newbyteorder("<")


def content_fingerprint(tokenizer: str, vocabulary: int, digests: list[bytes]) -> str:
    """Hex SHA-256 over the format, the tokenizer and the SHA-256 of each of `FILES`, in that order."""
    head = json.dumps([FORMAT, VERSION, tokenizer, vocabulary]).encode()
    return hashlib.sha256(head + b"\0" + b"".join(digests)).hexdigest()


def _read_header(path: Path) -> CorpusHeader:
    file = path / HEADER_NAME
    if not path.exists():
        raise RaypackError(f"no corpus at {path}: build one with `raypack data build`, or correct the path")
    if not file.is_file():
        raise RaypackError(f"{path} is no corpus (it has no {HEADER_NAME}); give a directory that `data build` made")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RaypackError(f"corpus {path}: {HEADER_NAME} cannot be read ({error}); build the corpus again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RaypackError(f"{path} is no raypack corpus ({HEADER_NAME} lacks format = {FORMAT}); build one of it")
    if data.get("version") != VERSION:
        raise RaypackError(
            f"corpus {path}: version {data.get('version')!r}, this raypack reads version {VERSION}; build it again"
        )
    return build(CorpusHeader, data, f"corpus {path}: {HEADER_NAME}")


def _damaged(path: Path, what: str) -> RaypackError:
    return RaypackError(f"corpus {path} is damaged: {what}; build it again")


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
