"""The run directory: where it is, who holds it, what a new run finds in it (docs/use.md)."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from raypack.checkpoint.addresses import store_of
from raypack.checkpoint.state import newest
from raypack.checkpoint.storage import is_url
from raypack.config import Config
from raypack.errors import RaypackError
from raypack.files import absolute, replace_file
from raypack.observe.run_files import CONFIG_FILE, LOCK_FILE, STEPS_FILE, unwritable

FREE_BYTES = 100 * 2**20


def resolve_run(config: Config) -> tuple[Path, str | None]:
    """The run's directory, and the path or URL of the checkpoint to go on from (None = the start). Writes nothing.

    Raises:
        RaypackError: no name, a directory that holds another run, nothing to resume from, or
            a storage that does not answer.
    """
    name, resume = config.run.name, config.run.resume
    if not name:
        raise RaypackError("run.name is empty: give the run directory's name")
    run_dir = absolute(config.run.root) / name
    if resume == "never":
        if _has_records(run_dir):
            raise RaypackError(f"{run_dir} holds a run already: give another --run.name, or --run.resume auto")
        own, _ = newest(store_of(config, run_dir))
        if own is not None:
            raise RaypackError(
                f"there are checkpoints of a run of this name, up to {own}, from which this one would go on when it "
                "loses a worker: give another --run.name, or --run.resume auto"
            )
        return run_dir, None
    if resume == "auto":
        found, notes = newest(store_of(config, run_dir))
        if found is None and notes:  # what there was is lost: nobody wants that to look like a fresh start
            raise RaypackError(
                "; ".join([f"{run_dir} has records but no complete checkpoint: give another --run.name", *notes])
            )
        return run_dir, found
    given = resume if is_url(resume) else str(absolute(resume))
    if not is_url(resume) and not Path(given).is_dir():
        raise RaypackError(f"run.resume = {resume!r}: no checkpoint directory {given}; use auto, never, a path or URL")
    own, _ = newest(store_of(config, run_dir))
    if own is not None and own.rstrip("/") != given.rstrip("/"):
        raise RaypackError(
            f"run.resume = {resume!r}: {run_dir} has checkpoints of its own, up to {own}, from which it would go on "
            "when it loses a worker: give another --run.name"
        )
    return run_dir, given


def _has_records(run_dir: Path) -> bool:
    file = run_dir / STEPS_FILE
    return file.exists() and file.stat().st_size > 0


def resume_notes(config: Config) -> list[str]:
    """A line about each damaged checkpoint that `resume = auto` passes over."""
    if config.run.resume != "auto":
        return []
    return newest(store_of(config, absolute(config.run.root) / config.run.name))[1]


def check_writable(run_dir: Path, setting: str = "run.root") -> None:
    """That a run could begin in `run_dir`, which may not be there yet and is below `setting`; writes nothing.

    Raises:
        RaypackError: it cannot be made or written, its disk is nearly full, or another driver holds it.
    """
    if (run_dir / LOCK_FILE).exists():
        with held(run_dir):
            pass
    there = next(path for path in (run_dir, *run_dir.parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        code = errno.EACCES if there.is_dir() else errno.ENOTDIR
        raise unwritable(run_dir, OSError(code, os.strerror(code)), setting)
    _check_free(there)


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Make the directory, and keep every other driver out of it meanwhile.

    Raises:
        RaypackError: it cannot be written, or another driver holds it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise unwritable(run_dir, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise RaypackError(
                f"{run_dir} belongs to a run that goes on ({lock.read().strip() or 'its driver is starting'}): "
                "wait for it, end it, or give another --run.name"
            ) from None
        except OSError as error:
            raise unwritable(run_dir, error) from None
        lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        yield


def write_config(run_dir: Path, config: Config, corpus: Path) -> None:
    """`config.toml`: everything resolved, so that `--run <run>/config.toml` from anywhere is the same run.

    Raises:
        RaypackError: the directory cannot be written, or its disk is nearly full.
    """
    data = config.model_dump()
    data["data"]["corpus"] = str(corpus)
    data["run"].update(root=str(run_dir.parent), resume="never")
    try:
        replace_file(run_dir / CONFIG_FILE, tomli_w.dumps(data))
    except OSError as error:
        raise unwritable(run_dir, error) from None
    _check_free(run_dir)


def _check_free(folder: Path) -> None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise unwritable(folder, error) from None
    if free < FREE_BYTES:
        raise RaypackError(f"{free / 1e6:.0f} MB are free at {folder}, a run needs 100: choose another run.root")
