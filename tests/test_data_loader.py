"""Rows and labels: cut anywhere, they are the document's own; nothing else is read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypack.data.loader import NO_LABEL, load_rows
from raypack.errors import RaypackError


class ListDocuments:
    """`Documents` over lists in memory that notes which ranges were read."""

    vocabulary, fingerprint = 100, "0" * 64

    def __init__(self, *texts: list[int]) -> None:
        self.texts = texts
        self.lengths = np.array([len(text) for text in texts])
        self.labels = self.lengths - 1
        self.read: list[tuple[int, int, int]] = []

    def documents(self, split: str) -> np.ndarray:
        return np.arange(len(self.texts) if split == "train" else 0)

    def tokens(self, document: int, lo: int, hi: int) -> np.ndarray:
        assert 0 <= lo <= hi <= len(self.texts[document])
        self.read.append((document, lo, hi))
        return np.array(self.texts[document][lo:hi], dtype=np.uint16)


def rows(
    corpus: ListDocuments, *segments: tuple[int, int, int], lengths: dict[int, int] | None = None
) -> tuple[list[int], list[int]]:
    table = [(d, (lengths or {}).get(d, len(corpus.texts[d])), lo, hi) for d, lo, hi in segments]
    tokens, labels = load_rows(corpus, *np.array(table, dtype=np.int64).reshape(-1, 4).T)
    assert tokens.dtype == labels.dtype == np.int64
    return tokens.tolist(), labels.tolist()


def test_no_label_is_lost_at_a_shard_border() -> None:
    corpus = ListDocuments([1, 2, 3, 4, 5, 6, 7, 8])
    assert rows(corpus, (0, 0, 4)) == ([1, 2, 3, 4], [2, 3, 4, 5])
    assert rows(corpus, (0, 4, 8)) == ([5, 6, 7, 8], [6, 7, 8, NO_LABEL])


def test_no_label_is_lost_in_a_zigzag_layout() -> None:
    corpus = ListDocuments([0, 1, 2, 3, 4, 5, 6, 7])
    assert rows(corpus, (0, 0, 2), (0, 6, 8))[1] == [1, 2, 7, NO_LABEL]
    assert rows(corpus, (0, 2, 6))[1] == [3, 4, 5, 6]


def test_a_document_never_predicts_the_next_one() -> None:
    corpus = ListDocuments([0, 1, 2], [10, 11, 12])
    labels = rows(corpus, (0, 0, 3), (1, 0, 3))[1]
    assert labels == [1, 2, NO_LABEL, 11, 12, NO_LABEL]
    assert sum(label != NO_LABEL for label in labels) == 4


def test_only_the_segment_and_one_token_more_is_read() -> None:
    corpus = ListDocuments(list(range(50)), list(range(50)))
    rows(corpus, (0, 10, 20), (1, 45, 50), (0, 7, 7))
    assert corpus.read == [(0, 10, 21), (1, 45, 50)]


def test_truncation_ends_the_labels_and_the_reading() -> None:
    corpus = ListDocuments(list(range(10)))
    assert rows(corpus, (0, 3, 6), lengths={0: 6}) == ([3, 4, 5], [4, 5, NO_LABEL])
    assert corpus.read == [(0, 3, 6)]


def test_empty_segments_and_no_segments_give_no_rows() -> None:
    corpus = ListDocuments([1, 2, 3])
    assert rows(corpus) == ([], [])
    assert rows(corpus, (0, 3, 3), (0, 0, 0)) == ([], [])
    assert rows(corpus, (0, 0, 0), (0, 2, 3), (0, 1, 1)) == ([3], [NO_LABEL])


@pytest.mark.parametrize("segment", [(0, 0, 4), (0, 2, 1), (0, -1, 2)])
def test_a_segment_outside_its_sample_is_refused(segment: tuple[int, int, int]) -> None:
    with pytest.raises(RaypackError, match="outside document 0"):
        rows(ListDocuments([1, 2, 3, 4]), segment, lengths={0: 3})


@given(data=st.data(), sizes=st.lists(st.integers(2, 30), min_size=1, max_size=5))
def test_any_cut_gives_the_rows_of_the_whole(data: st.DataObject, sizes: list[int]) -> None:
    corpus = ListDocuments(*([100 * d + i for i in range(size)] for d, size in enumerate(sizes)))
    kept = {d: data.draw(st.integers(2, size)) for d, size in enumerate(sizes)}
    segments = []
    for d, length in kept.items():
        cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=4))})
        segments += [(d, lo, hi) for lo, hi in pairwise(cuts)]
    expected = [corpus.texts[d][:length] for d, length in kept.items()]
    tokens, labels = rows(corpus, *segments, lengths=kept)
    assert tokens == [t for text in expected for t in text]
    assert labels == [t for text in expected for t in [*text[1:], NO_LABEL]]
