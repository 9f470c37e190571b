"""Whether checkpoints can be written where `train.checkpoint_root` says, and whether every node sees that place."""

from __future__ import annotations

from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypack.config import Config
from raypack.errors import RaypackError
from raypack.training.storage import Store, open_store, reason


def check_storage(config: Config, run_dir: Path, timeout: float) -> None:
    """Write and remove a small file, which every node of the Ray cluster looks for; nothing to do for the default.

    Raises:
        RaypackError: it cannot be written, or names the node that does not see it.
    """
    if not config.train.checkpoint_root:
        return
    store = Store.of(config, run_dir)
    with store.probed() as probe:
        nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
        asked = {
            node["NodeManagerAddress"]: _sees.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(store.address, probe)
            for node in (nodes if len(nodes) > 1 else [])
        }
        for name, answer in asked.items():
            try:
                fault = ray.get(answer, timeout=timeout)
            except ray.exceptions.RayError as error:
                raise RaypackError(f"node {name} did not answer the preflight: {str(error).splitlines()[0]}") from None
            if fault:
                raise RaypackError(
                    f"node {name} does not see {store.address} ({fault}): train.checkpoint_root must be storage that "
                    "all nodes share, with credentials on each"
                )


@ray.remote
def _sees(address: str, probe: str) -> str:
    """Why this node does not see the file `probe` there; empty where it does."""
    try:
        return "" if probe in open_store(address).listed() else "another directory"
    except RaypackError as error:
        return str(error)
    except OSError as error:
        return reason(error)
