"""Building a corpus: every kind of input, an all-or-nothing output, a split by text, and clear refusals."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypack.data.build import build_corpus, choose_holdout
from raypack.data.corpus import Corpus
from raypack.data.write import remove_abandoned
from raypack.errors import RaypackError


def build(tmp_path: Path, *inputs: str, **options: Any) -> Corpus:
    out = tmp_path / options.pop("out", "corpus")
    build_corpus([tmp_path / each for each in inputs], out, progress=False, **{"holdout": 0, **options})
    return Corpus.open(out)


def texts(corpus: Corpus) -> list[str]:
    rows = [corpus.tokens(i, 0, int(n) - 1) for i, n in enumerate(corpus.lengths)]
    return [bytes(row.astype(np.uint8)).decode() for row in rows]


def folder(tmp_path: Path) -> Path:
    """Files of all kinds below `in`."""
    place = tmp_path / "in"
    (place / "deep" / "er").mkdir(parents=True)
    (place / ".git").mkdir()
    (place / "__pycache__").mkdir()
    for name, content in {
        "b.py": b"print(1)\n",
        "a.txt": "grüße".encode(),
        "deep/er/c.md": b"c",
        "empty.txt": b"",
        "image.png": b"\x89PNG\x00\x01",
        "latin.txt": "grüße".encode("latin-1"),
        "cut.txt": "grüße".encode()[:3],
        ".git/config": b"hidden",
        ".hidden": b"hidden",
        "__pycache__/b.pyc": b"text",
        "deep/lines.jsonl": b'{"text": "one"}\n\n{"text": ""}\n{"text": "two", "other": 1}\n',
    }.items():
        (place / name).write_bytes(content)
    (place / "packed.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n{"text": "four"}'))
    (place / "dead").symlink_to(place / "nowhere")
    (place / "loop").symlink_to(place)
    os.mkfifo(place / "pipe")
    return place


def test_a_folder_gives_all_its_text_in_path_order_and_counts_the_rest(tmp_path: Path) -> None:
    folder(tmp_path)
    corpus = build(tmp_path, "in")
    assert texts(corpus) == ["grüße", "print(1)\n", "c", "one", "two", "three", "four"]
    assert corpus.header.provenance.skipped_empty == 2
    assert corpus.header.provenance.skipped_binary == 3


def test_inputs_keep_their_order_and_no_file_is_taken_twice(tmp_path: Path) -> None:
    folder(tmp_path)
    assert texts(build(tmp_path, "in/deep/er", "in/b.py", "in"))[:3] == ["c", "print(1)\n", "grüße"]
    assert len(Corpus.open(tmp_path / "corpus")) == 7


def test_the_corpus_does_not_depend_on_where_it_lies_or_on_the_order_of_the_file_system(tmp_path: Path) -> None:
    made = []
    for place, names in (("x", "abcdef"), ("other", "fedcba")):
        (tmp_path / place).mkdir()
        for name in names:
            (tmp_path / place / name).write_text(f"file {name}")
        made.append(build(tmp_path, place, out=f"corpus-{place}", holdout=0.3).fingerprint)
    assert made[0] == made[1]


def test_a_corpus_inside_its_own_input_is_not_read_back(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    first = build(tmp_path, "", out="corpus")
    again = build(tmp_path, "", out="corpus", force=True)
    assert first.fingerprint == again.fingerprint


def test_pieces_of_a_long_file_are_one_document(tmp_path: Path) -> None:
    text = "aü€😀" * 500_000  # 5 MB: no piece of 1 MiB ends at a character's end
    (tmp_path / "long.txt").write_text(text)
    corpus = build(tmp_path, "long.txt")
    assert texts(corpus) == [text]


def test_a_file_that_turns_binary_late_leaves_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("first")
    (tmp_path / "in" / "b.dat").write_bytes(b"x" * 3_000_000 + b"\xff")
    (tmp_path / "in" / "c.txt").write_text("last")
    corpus = build(tmp_path, "in")
    assert texts(corpus) == ["first", "last"]
    corpus.verify()
    assert corpus.header.provenance.skipped_binary == 1


def test_memory_is_bounded_and_does_not_grow_with_the_text(tmp_path: Path) -> None:
    with (tmp_path / "long.txt").open("w") as file:
        for _ in range(40):
            file.write("0123456789abcdef" * (1 << 16))  # 40 MiB in all
    tracemalloc.start()
    build(tmp_path, "long.txt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_another_field_and_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"body": "one"}\r\n{"body": "two"}')
    assert texts(build(tmp_path, "a.jsonl", text_field="body")) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{", "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b"[1]", "type list"),
        (b'{"body": "x"}', r"no key 'text' \(keys: body\).*--text-field"),
        (b'{"text": 3}', "type int"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_and_nothing_is_left(tmp_path: Path, line: bytes, text: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(RaypackError, match=rf"bad\.jsonl, line 2: .*{text}") as caught:
        build(tmp_path, "bad.jsonl")
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b'{"text": "x"}\n' * 1000)[:-20]])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(RaypackError, match=r"a\.jsonl\.gz"):
        build(tmp_path, "a.jsonl.gz")


def test_impossible_inputs_and_settings_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.bin").write_bytes(b"\0")
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    for name, options, text in (
        ("missing", {}, "missing: No such file"),
        ("empty", {}, "no documents in .*: 0 files"),
        ("a.bin", {}, "no UTF-8 text"),
        ("pipe", {}, "neither a file nor a folder"),
        ("a.txt", {"holdout": 1.0}, "--holdout 1.0"),
        ("a.txt", {"holdout": float("nan")}, "--holdout nan"),
        ("a.txt", {"tokenizer": "words"}, "tokenizer = 'words': must be 'byte' or package.module:object"),
        ("a.txt", {"out": "a.txt/corpus"}, "cannot build"),
    ):
        with pytest.raises(RaypackError, match=text):
            build(tmp_path, name, **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_is_replaced_only_by_force_and_only_if_it_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    build(tmp_path, "a.txt")
    with pytest.raises(RaypackError, match="exists: replace it with --force"):
        build(tmp_path, "b.txt")
    assert texts(Corpus.open(tmp_path / "corpus")) == ["a"]
    held = Corpus.open(tmp_path / "corpus")
    assert texts(build(tmp_path, "b.txt", force=True)) == ["b"]
    assert texts(held) == ["a"]  # an open corpus stays what it was
    with pytest.raises(RaypackError, match="missing"):
        build(tmp_path, "missing", force=True)
    assert texts(Corpus.open(tmp_path / "corpus")) == ["b"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("irreplaceable")
    for out in ("mine", "a.txt"):
        with pytest.raises(RaypackError, match="exists and is no corpus"):
            build(tmp_path, "b.txt", out=out, force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.txt", "b.txt", "corpus", "mine"]


SLOW_BUILD = """
import sys, time
from raypack.data import build, inputs

def slow(file, path, field):
    for number in range(1000):
        print(number, flush=True)
        yield (f"document {number}",)
        time.sleep(0.05)

inputs.READERS[".slow"] = slow
build.build_corpus([sys.argv[1]], sys.argv[2], progress=False)
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing_that_opens(tmp_path: Path, kind: signal.Signals) -> None:
    (tmp_path / "a.slow").write_text("x")
    out = tmp_path / "corpus"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(tmp_path / "a.slow"), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(kind)
    assert process.wait(timeout=30) != 0
    process.stdout.close()
    left = [each for each in tmp_path.iterdir() if each.is_dir()]
    assert not out.exists()
    for each in left:
        with pytest.raises(RaypackError):
            Corpus.open(each)
    assert len(left) == (1 if kind == signal.SIGKILL else 0)
    for each in left:  # the next build, an hour later, clears up
        os.utime(each, (time.time() - 7200, time.time() - 7200))
    (tmp_path / "a.txt").write_text("a")
    build(tmp_path, "a.txt")
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["corpus"]


def test_a_running_build_is_not_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "a.slow").write_text("x")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(tmp_path / "a.slow"), str(tmp_path / "corpus")],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        (running,) = (each for each in tmp_path.iterdir() if each.is_dir())
        os.utime(running, (time.time() - 7200, time.time() - 7200))
        remove_abandoned(tmp_path / "corpus")
        assert running.exists()
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()  # type: ignore[union-attr]


START_TOGETHER = """
import sys, sysconfig, time
from pathlib import Path
from raypack.data.corpus import Corpus
from raypack.data import default

default.sysconfig.get_path = lambda name: sys.argv[1]
while not Path(sys.argv[2], "go").exists():
    time.sleep(0.001)
print(Corpus.open(default.default_corpus(sys.argv[2], progress=False)).fingerprint)
"""


def test_processes_that_start_together_share_one_default_corpus(tmp_path: Path) -> None:
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    (tmp_path / "lib" / "site-packages" / "not.py").write_text("no")
    for i in range(50):
        (tmp_path / "lib" / f"m{i}.py").write_text(f"x = {i}\n" * i)
    command = [sys.executable, "-c", START_TOGETHER, str(tmp_path / "lib"), str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    prints = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(prints) == 1
    (corpus,) = (tmp_path / "corpora").iterdir()
    assert len(Corpus.open(corpus)) == 49


@given(
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50),
    more=st.lists(st.integers(0, 2**64 - 1), max_size=50),
    share=st.floats(0, 0.999),
)
def test_a_document_keeps_its_side_when_the_corpus_grows(keys: list[int], more: list[int], share: float) -> None:
    few = choose_holdout(np.array(keys, dtype=np.uint64), share)
    many = choose_holdout(np.array(keys + more, dtype=np.uint64), share)
    by_hash = np.array(keys, dtype=np.uint64) < np.uint64(int(share * 2**64))
    if by_hash.any() and not by_hash.all():
        assert few.tolist() == many[: len(keys)].tolist() == by_hash.tolist()
    if len(set(keys)) > 1:
        assert not few.all()
        assert few.any() == (share > 0)
    for key in set(keys):
        assert len({bool(side) for side, each in zip(few, keys, strict=True) if each == key}) == 1


def test_copies_of_a_text_are_on_one_side_and_the_share_is_met(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i % 2000}"}) for i in range(4000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = build(tmp_path, "a.jsonl", holdout=0.1)
    held = set(corpus.documents("holdout").tolist())
    assert {i % 2000 for i in held} == {i for i in held if i < 2000}
    assert 320 < len(held) < 480
