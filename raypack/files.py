"""Files that people name: read with errors that say which, checked before the work that fills them, written whole or
not at all."""

from __future__ import annotations

import os
import stat
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from raypack.errors import RaypackError

PICTURES = (".png", ".svg", ".pdf")
"""Endings of the pictures that raypack draws."""
TEXT_MAX = 1 << 28
"""Bytes of a text that is read whole: a device that never ends (/dev/zero) is an error, not a hang."""


def check_target(path: str | Path, what: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that `write_file` could not write, as far as that can be known before there is anything to write.

    Args:
        what: names the file in errors, e.g. `--json`.
        suffixes: endings that there is a writer for, lower case; none = any.

    Raises:
        RaypackError: no name, another suffix, a directory, a folder that is not there or lets nobody write, a file
            that is protected.
    """
    shown = _checked_name(path, what)
    if suffixes and (suffix := Path(path).suffix.lower()) not in suffixes:
        raise RaypackError(f"{shown}: ends in {suffix or 'nothing'}; give a name in {listed(suffixes)}")
    mode = _mode(path, shown)
    if mode is None or stat.S_ISREG(mode):
        _check_folder(Path(os.path.realpath(path)).parent, shown)
    elif stat.S_ISDIR(mode):
        raise RaypackError(f"{shown}: is a directory; give the name of a file")
    if mode is not None and not os.access(path, os.W_OK):
        raise RaypackError(f"{shown}: is write-protected; choose another file")


def check_new_folder(path: str | Path, what: str) -> None:
    """As `check_target`, for a directory that will be made along with its parents."""
    shown = _checked_name(path, what)
    _mode(path, shown)
    parents = Path(os.path.realpath(path)).parents
    _check_folder(next(folder for folder in parents if os.path.lexists(folder)), shown)


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a whole file or nothing: into a temporary sibling, then renamed.

    Raises:
        RaypackError: the file cannot be written.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise RaypackError(f"cannot write {path}: {error.strerror or error}; choose another file") from None


def replace_file(path: str | Path, content: str | bytes) -> None:
    """As `write_file`, for files of our own: readers never see half of it. Raises OSError."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    path = Path(path)
    if path.exists() and not path.is_file():
        # A pipe or a device (/dev/stdout, a shell's >(...)) must be written in place, not replaced by a file.
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_text(path: str | Path) -> str:
    """A UTF-8 file.

    Raises:
        RaypackError: it cannot be read, is no UTF-8, or has more than `TEXT_MAX` bytes.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(TEXT_MAX + 1)
        if len(data) > TEXT_MAX:
            raise RaypackError(f"cannot read {path}: has more than {TEXT_MAX >> 20} MB; give another file")
        return data.decode("utf-8")
    except OSError as error:
        raise RaypackError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RaypackError(f"cannot read {path}: is no UTF-8 text, at byte {error.start}") from None


def _checked_name(path: str | Path, what: str) -> str:
    """How errors name the path."""
    if not str(path):
        raise RaypackError(f"{what}: is empty; give the name of a file")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise RaypackError(f"{what} {str(path)!a}: is no UTF-8; choose another name") from None
    return f"{what} {path}"


def listed(names: Sequence[str]) -> str:
    """`a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _mode(path: str | Path, shown: str) -> int | None:
    """What kind of file is there, None for none."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RaypackError(f"{shown}: {error.strerror or error}; choose another name") from None


def _check_folder(folder: Path, shown: str) -> None:
    if not folder.is_dir():
        raise RaypackError(f"{shown}: there is no folder {folder}; make it or choose another")
    try:
        # Nothing but trying knows of read-only mounts, of rights beyond the mode, and of an administrator's.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RaypackError(f"{shown}: cannot write in {folder}: {error.strerror or error}; choose another") from None


def raypack_home() -> Path:
    """`RAYPACK_HOME`, absolute; default `~/raypack`."""
    return Path(os.environ.get("RAYPACK_HOME") or "~/raypack").expanduser().absolute()


# Set by Ray for the entrypoint of a submitted job, and for nothing else.
JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def absolute(path: str) -> Path:
    """Relative to the current directory; in a Ray job to RAYPACK_HOME, for there the current one may be a throw-away
    copy."""
    try:
        given = Path(path).expanduser()
    except RuntimeError:
        raise RaypackError(f"{path}: there is no such user; give the directory itself") from None
    base = raypack_home() if JOB_MARK in os.environ else Path.cwd()
    return given if given.is_absolute() else (base / given).absolute()
