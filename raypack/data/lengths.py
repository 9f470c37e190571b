"""Lists of sample lengths: the files they come in, and what a list looks like.

A length file is one step, for `raypack plan`, `simulate` and `data stats`: text (one integer a line), `.npy`, `.npz`
(key `lengths`) or Parquet (column `length`). Sample id = index from 0.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raypack.errors import RaypackError
from raypack.plan.plan_file import LENGTH_MAX

PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 99.9)


def read_lengths(path: str | Path) -> np.ndarray:
    """Read a length file.

    Returns:
        int64 [samples], tokens per sample, each at least 1, in the file's order.

    Raises:
        RaypackError: no such file, another kind of file, no length in it, or a length that is zero, negative or no
            integer (names the value and its line or index).
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise RaypackError(f"{path}: a length file ends in {', '.join(READERS)}, not in {path.suffix or 'nothing'}")
    if not path.is_file():
        raise RaypackError(f"{path}: {'is no file' if path.exists() else 'no such file'}; give a length file")
    try:
        lengths = reader(path)
    except OSError as error:
        raise RaypackError(f"cannot read {path}: {error.strerror or error}") from None
    if len(lengths) == 0:
        raise RaypackError(f"{path}: holds no lengths; a step needs at least one sample")
    return lengths


def _read_text(path: Path) -> np.ndarray:
    try:
        lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    except UnicodeDecodeError:
        raise RaypackError(f"{path}: is no text; a text length file has one integer a line") from None
    return np.array([_parse(line.strip(), f"{path}, line {n}") for n, line in enumerate(lines, 1)], dtype=np.int64)


def _parse(text: str, where: str) -> int:
    digits = text[1:] if text[:1] in ("-", "+") else text
    # int() alone would take 1_000 and other scripts' digits, which no other reader of the file would.
    if not (digits.isascii() and digits.isdigit()):
        raise RaypackError(f"{where}: {text[:40]!r} is no integer; give one length a line, in tokens")
    value = int(text) if len(digits) <= 20 else LENGTH_MAX + 1
    return _checked(value if text[0] != "-" else -abs(value), where)


def _checked(value: int, where: str) -> int:
    if value < 1:
        raise RaypackError(f"{where}: length {value} must be at least 1 token; remove the sample")
    if value > LENGTH_MAX:
        raise RaypackError(f"{where}: length exceeds {LENGTH_MAX}; lengths are tokens of one sample")
    return value


def _read_npy(path: Path) -> np.ndarray:
    return _from_array(_load(path, ".npy"), path, "a .npy length file")


def _read_npz(path: Path) -> np.ndarray:
    return _from_array(_load(path, ".npz"), path, "key 'lengths'")


def _load(path: Path, kind: str) -> object:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return loaded
        with loaded:
            if kind == ".npz" and "lengths" not in loaded.files:
                there = ", ".join(loaded.files[:8]) or "none"
                raise RaypackError(f"{path}: has no key 'lengths' (keys: {there}); store the lengths under that name")
            return loaded["lengths"] if kind == ".npz" else None
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise RaypackError(f"{path}: is no readable {kind} file ({error}); save integers with numpy") from None


def _from_array(values: object, path: Path, what: str) -> np.ndarray:
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        shape = list(values.shape) if isinstance(values, np.ndarray) else "another kind of file"
        raise RaypackError(f"{path}: {what} must be one row of integers, not {shape}")
    if values.dtype.kind not in "iu":
        first = f", such as {values[0].item()!r} at index 0," if len(values) else ""
        raise RaypackError(f"{path}: {what} holds {values.dtype}{first} not integers; convert the lengths to int64")
    wrong = np.flatnonzero((values < 1) | (values > LENGTH_MAX))
    if len(wrong):
        _checked(int(values[wrong[0]]), f"{path}, index {wrong[0]}")
    return values.astype(np.int64)


def _read_parquet(path: Path) -> np.ndarray:
    # pyarrow takes a third of a second to import; only this kind of file needs it.
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if "length" not in names:
            raise RaypackError(f"{path}: has no column 'length' (columns: {', '.join(names[:8]) or 'none'})")
        column = file.read(columns=["length"]).column("length")
    except arrow.ArrowException as error:
        raise RaypackError(f"{path}: is no readable Parquet file ({error})") from None
    if not arrow.types.is_integer(column.type):
        raise RaypackError(f"{path}: column 'length' holds {column.type}, not integers; convert the lengths to int64")
    if column.null_count:
        index = column.is_null().to_numpy().argmax()
        raise RaypackError(f"{path}, index {index}: length is null; every row needs a length of at least 1 token")
    return _from_array(column.to_numpy(), path, "column 'length'")


READERS: dict[str, Callable[[Path], np.ndarray]] = {
    ".txt": _read_text,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
}


@dataclass(frozen=True)
class Bin:
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int
    squares_share: float


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths in tokens, shares as fractions."""

    documents: int
    tokens: int
    mean: float
    shortest: int
    longest: int
    percentiles: dict[str, int]
    top_percent_squares_share: float
    """Share of the sum of squared lengths that the longest 1 % of the documents hold: full attention's tail."""
    histogram: tuple[Bin, ...]


def length_statistics(lengths: np.ndarray) -> LengthStatistics:
    """Percentiles, histogram, and how much of the attention work the tail holds.

    Args:
        lengths: int64 [documents], not empty, each at least 1.
    """
    ordered = np.sort(lengths)
    squares = ordered.astype(np.float64) ** 2
    top = math.ceil(len(ordered) / 100)
    # The inverted distribution function: a percentile is one of the lengths, not a mean of two.
    values = np.percentile(ordered, PERCENTILES, method="inverted_cdf")
    return LengthStatistics(
        documents=len(ordered),
        tokens=int(ordered.sum()),
        mean=float(ordered.mean()),
        shortest=int(ordered[0]),
        longest=int(ordered[-1]),
        percentiles={f"p{p:g}": int(value) for p, value in zip(PERCENTILES, values, strict=True)},
        top_percent_squares_share=float(squares[-top:].sum() / squares.sum()),
        histogram=_histogram(ordered, squares),
    )


def _histogram(ordered: np.ndarray, squares: np.ndarray) -> tuple[Bin, ...]:
    """Bins by powers of two, from the shortest's to the longest's, empty ones between them included."""
    bins, total = [], float(squares.sum())
    low = 1 << (int(ordered[0]).bit_length() - 1)
    while low <= ordered[-1]:
        first, end = np.searchsorted(ordered, (low, 2 * low))
        held = slice(first, end)
        share = float(squares[held].sum()) / total
        bins.append(Bin(low, 2 * low - 1, int(end - first), int(ordered[held].sum()), share))
        low *= 2
    return tuple(bins)
