"""Text to token ids. A tokenizer is a class with this protocol, shipped or `package.module:object` of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from raypack.registry import blame, resolve


class Tokenizer(Protocol):
    """Made without arguments. `name` is what the corpus remembers; ids lie in 0..`vocabulary` - 1; `end_of_document`
    is the one that closes every document."""

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
    """The tokenizer of a name.

    Raises:
        RaypackError: there is none, or it cannot be made.
    """
    kind = resolve(name, TOKENIZERS, "tokenizer", _fits, "a class with name, vocabulary, end_of_document, encode")
    try:
        made: Tokenizer = kind()
    except Exception as error:
        raise blame(name, "tokenizer", error) from error
    return made


def _fits(kind: Any) -> bool:
    return callable(kind) and all(hasattr(kind, part) for part in ("name", "vocabulary", "end_of_document", "encode"))
