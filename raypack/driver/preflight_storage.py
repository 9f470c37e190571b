"""Whether checkpoints can be written where `train.checkpoint_root` says, and whether every node sees that place."""

from __future__ import annotations

from pathlib import Path

import ray

from raypack.checkpoint.storage import Store, open_store, reason
from raypack.config import Config
from raypack.driver.each_node import ask_each_node
from raypack.errors import RaypackError


def check_storage(config: Config, run_dir: Path, timeout: float) -> None:
    """Write and remove a small file, which every node of the Ray cluster looks for; nothing to do for the default.

    Raises:
        RaypackError: it cannot be written, or names the node that does not see it.
    """
    if not config.train.checkpoint_root:
        return
    store = Store.of(config, run_dir)
    with store.probed() as probe:
        if not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) < 2:
            return
        for name, fault in ask_each_node(_sees, store.address, probe, timeout=timeout):
            if fault:
                raise RaypackError(
                    f"node {name} does not see {store.address} ({fault}): train.checkpoint_root must be storage that "
                    "all nodes share, with credentials on each"
                )


def _sees(address: str, probe: str) -> str:
    """Why this node does not see the file `probe` there; empty where it does."""
    try:
        return "" if probe in open_store(address).listed() else "another directory"
    except RaypackError as error:
        return str(error)
    except OSError as error:
        return reason(error)
