"""A rank's own rows: the tokens and next-token labels of the segments that its layout gives it, and no others."""

from __future__ import annotations

import numpy as np

from raypack.data.corpus import Documents
from raypack.errors import RaypackError

NO_LABEL = -100
"""As torch's `cross_entropy` ignores."""


def load_rows(
    corpus: Documents, documents: np.ndarray, lengths: np.ndarray, lows: np.ndarray, highs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Read the rows of segments end to end. Of segment i only tokens [lows[i], highs[i] + 1) are read.

    A token's label is the next token of the same document, wherever the segment is cut; the sample's last token (of
    the document, or where truncation ends it) has none. Nothing is shifted later.

    Args:
        documents, lengths: integers [segments], the segment's sample and its length after truncation.
        lows, highs: integers [segments]; segment i holds tokens [lows[i], highs[i]) of documents[i].

    Returns:
        tokens and labels, both int64 [sum of highs - lows]; `NO_LABEL` where there is none.

    Raises:
        RaypackError: a segment outside its sample, or as `Documents.tokens`.
    """
    table = [np.asarray(column).tolist() for column in (documents, lengths, lows, highs)]
    rows = sum(table[3]) - sum(table[2])
    tokens, labels = np.empty(max(rows, 0), dtype=np.int64), np.full(max(rows, 0), NO_LABEL, dtype=np.int64)
    at = 0
    for document, length, lo, hi in zip(*table, strict=True):
        if not 0 <= lo <= hi <= length:
            raise RaypackError(f"segment [{lo}, {hi}) lies outside document {document}'s sample of {length} tokens")
        if lo == hi:
            continue
        ids = corpus.tokens(document, lo, min(hi + 1, length))
        tokens[at : at + hi - lo] = ids[: hi - lo]
        labels[at : at + len(ids) - 1] = ids[1:]
        at += hi - lo
    return tokens, labels
