"""Text to token ids. A new tokenizer is a class with this protocol and an entry in `TOKENIZERS`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from raypack.errors import RaypackError


class Tokenizer(Protocol):
    """`vocabulary` ids from 0; `end_of_document` is the id that closes every document."""

    name: str
    vocabulary: int
    end_of_document: int

    def encode(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        """Token ids of one document, whose text comes in pieces, without the end-of-document id.

        A tokenizer whose tokens may span pieces joins them itself.
        """
        ...


class ByteTokenizer:
    """The UTF-8 bytes of the text, and 256 as end of document."""

    name = "byte"
    vocabulary = 257
    end_of_document = 256

    def encode(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        for chunk in chunks:
            yield np.frombuffer(chunk.encode("utf-8"), dtype=np.uint8)


TOKENIZERS: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer}


def make_tokenizer(name: str) -> Tokenizer:
    """Raises RaypackError for a name that is not in `TOKENIZERS`."""
    if name not in TOKENIZERS:
        raise RaypackError(f"tokenizer {name!r} is unknown: there are {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()
