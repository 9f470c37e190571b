"""From an address, a path or a URL, to the store behind it."""

from __future__ import annotations

import os
from pathlib import Path

from raypack.checkpoint.storage import FOLDER, LocalStore, Store, is_url, split
from raypack.config import Config


def open_store(address: str | os.PathLike[str]) -> Store:
    """The store at a directory or URL; nothing is created yet.

    Raises:
        RaypackError: a URL that pyarrow cannot open.
    """
    text = os.fspath(address)
    if not is_url(text):
        return LocalStore(Path(text))
    from raypack.checkpoint.objects import ObjectStore  # most runs need no pyarrow

    return ObjectStore(text)


def locate(address: str | os.PathLike[str]) -> tuple[Store, str]:
    """The store that holds the checkpoint at `address`, and the checkpoint's name in it."""
    path, mark, query = split(os.fspath(address))
    parent, _, name = path.rstrip("/").rpartition("/")
    return open_store((parent or ".") + mark + query), name


def store_of(config: Config, run_dir: Path) -> Store:
    """Where the run in `run_dir` keeps its checkpoints."""
    root = config.train.checkpoint_root
    if not root:
        return LocalStore(run_dir / FOLDER)
    path, mark, query = split(root)
    return open_store(f"{path.rstrip('/')}/{run_dir.name}{mark}{query}")
