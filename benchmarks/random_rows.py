"""Rows of documents that are in no corpus: random tokens, and labels as a corpus has them."""

from __future__ import annotations

import numpy as np

from raypack.data.loader import NO_LABEL


def random_rows(
    lengths: np.ndarray, lows: np.ndarray, highs: np.ndarray, vocabulary: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """int64 tokens and labels of the rows [low, high) of each document; its last token has no label."""
    lengths, lows, highs = (np.asarray(each) for each in (lengths, lows, highs))
    tokens = np.random.default_rng(seed).integers(0, vocabulary, int((highs - lows).sum()))
    labels, ends = tokens.copy(), np.cumsum(highs - lows)
    labels[ends[(highs == lengths) & (highs > lows)] - 1] = NO_LABEL
    return tokens, labels
