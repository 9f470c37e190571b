"""`raypack data`: right figures for people and for programs, and one line where something is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from raypack.commands.common import handle_errors, write_json
from raypack.commands.data import data
from raypack.data.corpus import Corpus
from raypack.data.lengths import length_statistics
from raypack.errors import RaypackError

REAL_LENGTHS = Path(os.environ.get("RAYPACK_LENGTHS") or "absent")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(data, [str(each) for each in arguments])


def refused(result: Result, text: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert text in line


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300))
def test_statistics_are_those_of_the_list(lengths: list[int]) -> None:
    figures = length_statistics(np.array(lengths))
    ordered = sorted(lengths)
    top = ordered[-max(1, -(-len(ordered) // 100)) :]
    squares = sum(n * n for n in ordered)
    assert (figures.documents, figures.tokens) == (len(ordered), sum(ordered))
    assert (figures.shortest, figures.longest) == (ordered[0], ordered[-1])
    assert figures.percentiles["p50"] == ordered[(len(ordered) + 1) // 2 - 1]
    assert figures.top_percent_squares_share == pytest.approx(sum(n * n for n in top) / squares)
    assert sum(each.documents for each in figures.histogram) == len(ordered)
    assert sum(each.squares_share for each in figures.histogram) == pytest.approx(1)
    for each in figures.histogram:
        held = [n for n in ordered if each.low <= n <= each.high]
        assert (each.documents, each.tokens) == (len(held), sum(held))
    assert figures.histogram[0].documents
    assert figures.histogram[-1].documents


@pytest.mark.skipif(not REAL_LENGTHS.is_dir(), reason="RAYPACK_LENGTHS names no directory with the real length lists")
@pytest.mark.parametrize(
    ("name", "documents", "mean", "p50", "p99", "longest", "share"),
    [
        ("wikipedia", 1_000_000, 1014, 347, 10_900, 1_820_000, 0.84),
        ("wlb128k", 99_519, 3962, 3227, 26_000, 125_000, 0.79),
        ("prolong", 77_932, 3052, 1914, 16_000, 340_000, 0.63),
    ],
)
def test_the_real_lists_have_the_published_figures(
    name: str, documents: int, mean: float, p50: int, p99: int, longest: int, share: float
) -> None:
    figures = json.loads(call("stats", REAL_LENGTHS / f"{name}.npz", "--json", "-").stdout)
    assert figures["documents"] == documents
    assert figures["mean"] == pytest.approx(mean, abs=0.5)
    assert figures["percentiles"]["p50"] == pytest.approx(p50, abs=1)
    assert figures["percentiles"]["p99"] == pytest.approx(p99, rel=0.03)
    assert figures["longest"] == pytest.approx(longest, rel=0.005)
    assert figures["top_percent_squares_share"] == pytest.approx(share, abs=0.005)


def test_build_then_stats_agree(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text("x" * (i + 1))
    out = tmp_path / "corpus"
    built = call("build", "--input", tmp_path, "--out", out, "--holdout", "0.2", "--json", "-")
    assert built.exit_code == 0
    header = json.loads(built.stdout)
    assert (header["documents"], header["tokens"]) == (40, sum(range(2, 42)))
    stats = json.loads(call("stats", out, "--verify", "--json", "-").stdout)
    assert stats["corpus"]["fingerprint"] == header["fingerprint"] == Corpus.open(out).fingerprint
    assert (stats["documents"], stats["tokens"], stats["longest"]) == (40, sum(range(2, 42)), 41)
    assert 0 < stats["corpus"]["holdout"]["documents"] < 20
    shown = call("stats", out, "--json", tmp_path / "stats.json")
    assert json.loads((tmp_path / "stats.json").read_text()) == stats
    for text in ("training", "held out", "p99.9", "█", "squared lengths", "vocabulary 257"):
        assert text in shown.stdout


def test_several_inputs_another_field_and_force(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    (tmp_path / "b.txt").write_text("two")
    command = ("build", "--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.txt", "--out", tmp_path / "c")
    refused(call(*command), "has no key 'text'")
    assert call(*command, "--text-field", "body").exit_code == 0
    assert len(Corpus.open(tmp_path / "c")) == 2
    refused(call(*command, "--text-field", "body"), "exists: replace it with --force")
    assert call(*command, "--text-field", "body", "--force").exit_code == 0


def test_a_length_file_has_statistics_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("3\n5\n100\n")
    figures = json.loads(call("stats", tmp_path / "a.txt", "--json", "-").stdout)
    assert (figures["documents"], figures["tokens"], figures["longest"]) == (3, 108, 100)
    assert "corpus" not in figures
    assert "100" in call("stats", tmp_path / "a.txt").stdout


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("3\n0\n")
    (tmp_path / "other.csv").write_text("3\n")
    refused(call("stats", tmp_path / "bad.txt"), "line 2: length 0")
    refused(call("stats", tmp_path / "other.csv"), ".parquet")
    refused(call("stats", tmp_path / "missing.npz"), "no such file")
    refused(call("stats", tmp_path / "missing"), "no corpus at")
    refused(call("stats", tmp_path), "is no corpus")
    refused(call("build", "--input", tmp_path / "missing", "--out", tmp_path / "c"), "missing")
    refused(call("build", "--input", tmp_path, "--out", tmp_path / "c", "--holdout", "2"), "--holdout 2.0")
    (tmp_path / "good.txt").write_text("3\n")
    refused(call("stats", tmp_path / "good.txt", "--json", tmp_path / "no" / "x.json"), "there is no folder")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("command", ["build", "stats"])
def test_help_says_units_and_defaults(command: str) -> None:
    text = " ".join(call(command, "--help").stdout.split())
    assert "--json" in text
    for expected in ("[default: 0.01]", "[default: text]", "[default: byte]") if command == "build" else ("in tokens",):
        assert expected in text


def test_ctrl_c_is_one_line_and_exit_code_130() -> None:
    @click.command()
    @handle_errors
    def command() -> None:
        raise KeyboardInterrupt

    result = CliRunner().invoke(command)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "error: interrupted\n")


def test_json_files_are_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json({"a": 1}, str(target))
    write_json({"a": 2}, str(target))
    assert json.loads(target.read_text()) == {"a": 2}
    with pytest.raises(RaypackError, match="cannot write"):
        write_json({}, str(tmp_path))
    assert json.loads(target.read_text()) == {"a": 2}
    write_json({"a": float("nan")}, str(target))
    assert json.loads(target.read_text()) == {"a": None}
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
