"""Length files: every kind gives the same lengths; what is no length is named with its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from raypack.data.lengths import read_lengths
from raypack.errors import RaypackError

LENGTHS = [5, 1, 131_072, 7]


def write(folder: Path, suffix: str, values: object) -> Path:
    path = folder / f"lengths{suffix}"
    if suffix == ".txt":
        path.write_text("\n".join(map(str, values)) + "\n")  # type: ignore[call-overload]
    elif suffix == ".npy":
        np.save(path, np.asarray(values), allow_pickle=True)
    elif suffix == ".npz":
        np.savez(path, lengths=np.asarray(values))
    else:
        parquet.write_table(pyarrow.table({"length": values}), path)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".npy", ".npz", ".parquet"])
def test_every_kind_of_file_gives_the_same_int64_lengths_in_file_order(tmp_path: Path, suffix: str) -> None:
    lengths = read_lengths(write(tmp_path, suffix, LENGTHS))
    assert lengths.dtype == np.int64
    assert lengths.tolist() == LENGTHS


@pytest.mark.parametrize("suffix", [".txt", ".npy", ".npz", ".parquet"])
@pytest.mark.parametrize(("values", "value", "place"), [([4, 0, 2], "0", 1), ([4, 5, -3], "-3", 2)])
def test_a_length_below_one_is_named_with_its_place(
    tmp_path: Path, suffix: str, values: list[int], value: str, place: int
) -> None:
    where = f"line {place + 1}" if suffix == ".txt" else f"index {place}"
    with pytest.raises(RaypackError, match=rf"{where}: length {value} must be at least 1"):
        read_lengths(write(tmp_path, suffix, values))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".parquet"])
@pytest.mark.parametrize("values", [[1.5, 2.0], [3.0, 4.0], [True, False]])
def test_values_that_are_no_integers_are_refused(tmp_path: Path, suffix: str, values: list[object]) -> None:
    with pytest.raises(RaypackError, match="not integers"):
        read_lengths(write(tmp_path, suffix, values))


@pytest.mark.parametrize("text", ["1.5", "1e3", "1_000", "٣", "abc", "", "1 2", "0x10", "--3"])
def test_a_line_that_is_no_integer_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(RaypackError, match=r"lengths\.txt, line 2: .* is no integer"):
        read_lengths(write(tmp_path, ".txt", ["3", text, "4"]))


def test_a_length_beyond_int64_is_refused_and_not_wrapped(tmp_path: Path) -> None:
    for path in (
        write(tmp_path, ".txt", [2**63]),
        write(tmp_path, ".txt", ["9" * 5000]),
        write(tmp_path, ".npy", np.array([2**63], dtype=np.uint64)),
    ):
        with pytest.raises(RaypackError, match="exceeds"):
            read_lengths(path)


@pytest.mark.parametrize("suffix", [".txt", ".npy", ".npz", ".parquet"])
def test_an_empty_list_is_refused(tmp_path: Path, suffix: str) -> None:
    values = pyarrow.array([], pyarrow.int64()) if suffix == ".parquet" else np.array([], dtype=np.int64)
    with pytest.raises(RaypackError, match="holds no lengths"):
        read_lengths(write(tmp_path, suffix, values))


def test_a_null_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(RaypackError, match="index 1: length is null"):
        read_lengths(write(tmp_path, ".parquet", [3, None, 4]))


def test_another_key_column_or_shape_is_refused_with_what_is_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", sizes=np.array([1, 2]))
    parquet.write_table(pyarrow.table({"size": [1]}), tmp_path / "a.parquet")
    np.save(tmp_path / "a.npy", np.ones((2, 2), dtype=np.int64))
    for name, text in (("a.npz", "keys: sizes"), ("a.parquet", "columns: size"), ("a.npy", r"not \[2, 2\]")):
        with pytest.raises(RaypackError, match=text):
            read_lengths(tmp_path / name)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".parquet"])
def test_a_file_of_another_kind_or_cut_short_is_one_clear_line(tmp_path: Path, suffix: str) -> None:
    whole = write(tmp_path, suffix, list(range(1, 2000))).read_bytes()
    for content in (b"", b"12\n13\n", whole[: len(whole) // 2], b"\x80\x04K\x01."):
        path = tmp_path / f"bad{suffix}"
        path.write_bytes(content)
        with pytest.raises(RaypackError, match=r"bad\.") as caught:
            read_lengths(path)
        assert "\n" not in str(caught.value)


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    with pytest.raises(RaypackError, match="readable"):
        read_lengths(write(tmp_path, ".npy", np.array([1, "x"], dtype=object)))


def test_a_binary_text_file_an_unknown_suffix_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe1\n")
    (tmp_path / "c.csv").write_text("1\n")
    (tmp_path / "d.txt").mkdir()
    for name, text in (
        ("b.txt", "is no text"),
        ("c.csv", r"\.txt, \.npy, \.npz, \.parquet"),
        ("d.txt", "is no file"),
        ("e.npz", "no such file"),
    ):
        with pytest.raises(RaypackError, match=text):
            read_lengths(tmp_path / name)
