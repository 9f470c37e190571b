"""A corpus gives back what was built, reads only what is asked for, and opens only when it is whole."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypack.config import DataSection
from raypack.data.build import build_corpus
from raypack.data.corpus import FILES, Corpus, check_vocabulary
from raypack.data.default import default_corpus
from raypack.data.loader import load_rows
from raypack.data.splits import holdout_samples, training_stream
from raypack.errors import RaypackError

TEXTS = [f"document {i}: " + "wörd " * (i % 7) * (i % 11) + "end\n" for i in range(60)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines)
    build_corpus([tmp_path / "texts.jsonl"], tmp_path / "corpus", holdout=0.2, progress=False)
    return tmp_path / "corpus"


def change_header(path: Path, **changes: Any) -> None:
    data = json.loads((path / "corpus.json").read_text())
    (path / "corpus.json").write_text(json.dumps({**data, **changes}))


def test_every_document_is_its_utf8_bytes_and_one_end_token(path: Path) -> None:
    corpus = Corpus.open(path)
    assert len(corpus) == len(TEXTS)
    for i, text in enumerate(TEXTS):
        data = text.encode()
        assert corpus.lengths[i] == len(data) + 1
        assert corpus.labels[i] == len(data)
        assert corpus.tokens(i, 0, len(data) + 1).tolist() == [*data, 256]
        assert corpus.tokens(i, 3, 9).tolist() == list(data[3:9])
        assert corpus.tokens(i, 2, 2).tolist() == []
    assert corpus.vocabulary == 257
    assert corpus.tokens(0, 0, 1).dtype == np.uint16


def test_a_range_outside_a_document_is_refused_and_never_the_neighbour(path: Path) -> None:
    corpus = Corpus.open(path)
    length = int(corpus.lengths[4])
    for document, lo, hi in ((4, 0, length + 1), (4, -1, 2), (4, 3, 2), (60, 0, 1), (-1, 0, 1)):
        with pytest.raises(RaypackError, match="document"):
            corpus.tokens(document, lo, hi)


def test_only_the_asked_range_is_read_from_the_file(path: Path) -> None:
    corpus = Corpus.open(path)
    first = int(corpus.lengths[:9].sum())
    with (path / "tokens.bin").open("r+b") as file:  # spoil every other token of the file
        spoiled = np.full(corpus.header.tokens, 9999, dtype="<u2")
        spoiled[first + 2 : first + 5] = [7, 8, 9]
        file.write(spoiled.tobytes())
    assert corpus.tokens(9, 2, 5).tolist() == [7, 8, 9]


def test_the_splits_cover_the_corpus_once(path: Path) -> None:
    corpus = Corpus.open(path)
    train, held = corpus.documents("train"), corpus.documents("holdout")
    assert sorted([*train, *held]) == list(range(60))
    assert 0 < len(held) < 30
    assert (corpus.header.holdout.documents, corpus.header.holdout.tokens) == (len(held), corpus.lengths[held].sum())
    stream = training_stream(corpus, DataSection(tokens_per_step=100_000))
    assert sorted(stream.step(stream.start).samples.ids) == train.tolist()


def test_a_fingerprint_names_the_content(path: Path, tmp_path: Path) -> None:
    corpus = Corpus.open(path)
    corpus.verify()
    source = tmp_path / "texts.jsonl"
    same = build_corpus([source], tmp_path / "same", holdout=0.2, progress=False)
    assert same.fingerprint == corpus.fingerprint
    assert build_corpus([source], tmp_path / "split", holdout=0.5, progress=False).fingerprint != corpus.fingerprint
    source.write_text(source.read_text().replace("document 7", "document 8"))
    assert build_corpus([source], tmp_path / "text", holdout=0.2, progress=False).fingerprint != corpus.fingerprint


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_one_changed_byte_in_any_file(path: Path, name: str) -> None:
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(RaypackError, match=r"damaged|differs"):
        Corpus.open(path).verify()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["cut", "longer", "missing"])
def test_a_truncated_corpus_does_not_open(path: Path, name: str, change: str) -> None:
    file = path / name
    content = file.read_bytes()
    file.unlink()
    if change != "missing":
        file.write_bytes(content[:-1] if change == "cut" else content + b"\0")
    with pytest.raises(RaypackError, match=name.replace(".", r"\.")):
        Corpus.open(path)


def test_what_is_no_corpus_is_refused_with_one_line(path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, text in (
        (tmp_path / "nothing", "no corpus at"),
        (tmp_path / "empty", "is no corpus"),
        (tmp_path / "texts.jsonl", "is no corpus"),
    ):
        with pytest.raises(RaypackError, match=text):
            Corpus.open(place)
    for content, text in (
        (b"", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "no raypack"),
        (b"{}", "no raypack"),
    ):
        (path / "corpus.json").write_bytes(content)
        with pytest.raises(RaypackError, match=text):
            Corpus.open(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2, "shards": []}, "version 2, this raypack reads version 1"),
        ({"format": "other"}, "no raypack corpus"),
        ({"documents": 0}, "documents"),
        ({"documents": 61}, r"offsets\.bin has"),
        ({"tokens": "many"}, "tokens"),
        ({"vocabulary": 70_000}, r"tokens\.bin has"),
        ({"fingerprint": "xyz"}, "fingerprint"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_foreign_or_changed_header_is_named(path: Path, changes: dict[str, Any], text: str) -> None:
    change_header(path, **changes)
    with pytest.raises(RaypackError, match=text) as caught:
        Corpus.open(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at", [0, 30, 60])
def test_offsets_that_make_no_documents_are_found(path: Path, at: int) -> None:
    offsets = np.fromfile(path / "offsets.bin", dtype="<i8")
    offsets[at] = offsets[at] + 100_000
    offsets.tofile(path / "offsets.bin")
    with pytest.raises(RaypackError, match="damaged"):
        print(Corpus.open(path).lengths)


@pytest.mark.parametrize("count", [-1, 3, 100_000])
def test_label_counts_that_the_rows_would_not_have_are_refused_before_training(path: Path, count: int) -> None:
    """Fewer than length - 1 would be a mask, which the rows don't know: all tokens would be trained on."""
    corpus = Corpus.open(path)
    labels, split = np.array(corpus.labels), "holdout" if 5 in corpus.documents("holdout") else "train"
    labels[5] = count
    labels.tofile(path / "labels.bin")
    length, use = int(corpus.lengths[5]), {"train": training_stream, "holdout": holdout_samples}[split]
    said = rf"document 5 has {length} tokens and {count} labels \(labels\.bin\), and must have {length - 1}"
    with pytest.raises(RaypackError, match=said):
        use(Corpus.open(path), DataSection())


def test_token_ids_outside_the_vocabulary_are_refused(path: Path) -> None:
    corpus = Corpus.open(path)
    check_vocabulary(corpus, 257)
    with pytest.raises(RaypackError, match=r"model\.vocabulary = 256: .* up to 256"):
        check_vocabulary(corpus, 256)
    tokens = np.fromfile(path / "tokens.bin", dtype="<u2")
    tokens[4] = 257
    tokens.tofile(path / "tokens.bin")
    with pytest.raises(RaypackError, match="token id 257"):
        Corpus.open(path).tokens(0, 0, 8)


def test_a_pickled_corpus_is_its_path(path: Path) -> None:
    corpus = Corpus.open(path)
    data = pickle.dumps(corpus)
    assert len(data) < 1000
    assert pickle.loads(data).tokens(3, 0, 5).tolist() == corpus.tokens(3, 0, 5).tolist()


def test_all_ranks_rows_are_the_documents(path: Path) -> None:
    corpus = Corpus.open(path)
    for document in (0, 13):
        length = int(corpus.lengths[document])
        cuts = [0, length // 3, length // 2, length]
        parts = [load_rows(corpus, [document], [length], [lo], [hi]) for lo, hi in pairwise(cuts)]
        tokens, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
        assert tokens.tolist() == corpus.tokens(document, 0, length).tolist()
        assert labels.tolist() == [*tokens[1:].tolist(), -100]
        assert (labels >= 0).sum() == corpus.labels[document]


def test_the_held_out_set_is_one_choice_that_fits(path: Path) -> None:
    corpus = Corpus.open(path)
    held = corpus.documents("holdout")
    everything = holdout_samples(corpus, DataSection(holdout_tokens=1_000_000))
    assert everything is not None
    assert everything.ids.tolist() == held.tolist()
    some = holdout_samples(corpus, DataSection(holdout_tokens=300, seed=1))
    other = holdout_samples(corpus, DataSection(holdout_tokens=300, seed=2))
    assert some is not None
    assert other is not None
    assert some.ids.tolist() == other.ids.tolist()
    assert 150 < some.lengths.sum() <= 300
    assert set(some.ids.tolist()) < set(held.tolist())
    cut = holdout_samples(corpus, DataSection(holdout_tokens=300, max_sample_tokens=20))
    assert cut is not None
    assert cut.lengths.max() == 20
    assert (cut.labels == cut.lengths - 1).all()
    assert holdout_samples(corpus, DataSection(holdout_tokens=0)) is None
    with pytest.raises(RaypackError, match=r"holdout_tokens = 3: the shortest held-out sample has"):
        holdout_samples(corpus, DataSection(holdout_tokens=3))


def test_a_corpus_without_held_out_documents_has_no_held_out_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    build_corpus([tmp_path / "a.txt"], tmp_path / "corpus", holdout=0, progress=False)
    assert holdout_samples(Corpus.open(tmp_path / "corpus"), DataSection()) is None


def test_the_default_corpus_is_built_once_and_holds_the_standard_library(tmp_path: Path) -> None:
    path = default_corpus(tmp_path, progress=False)
    assert path.parent == tmp_path / "corpora"
    made = (path / "corpus.json").stat().st_mtime_ns
    corpus = Corpus.open(path)
    assert len(corpus) > 500
    assert np.percentile(corpus.lengths, 99) > 10 * np.median(corpus.lengths)
    assert len(corpus.documents("holdout")) >= 1
    longest = int(corpus.lengths.argmax())
    text = bytes(corpus.tokens(longest, 0, int(corpus.lengths[longest]) - 1).astype(np.uint8)).decode()
    assert len(text.splitlines()) > 100
    assert default_corpus(tmp_path, progress=False) == path
    assert (path / "corpus.json").stat().st_mtime_ns == made
