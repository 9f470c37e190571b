"""What a running Ray cluster offers: its nodes, what its autoscaler may add, and what each node sees on disk."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray

from raypack.clusters.check import ClusterShape, Fault, NodeType
from raypack.config import Config
from raypack.data.corpus import HEADER_NAME
from raypack.driver.each_node import ask_each_node
from raypack.driver.ray_cluster import connected
from raypack.errors import RaypackError
from raypack.files import absolute, raypack_home


def read_live_cluster(config: Config, address: str) -> tuple[ClusterShape, list[Fault]]:
    """Ask the cluster at `address` (HOST:PORT or auto) for its nodes, and every node for the run's places.

    Returns:
        What it offers, and a fault where a node does not see the corpus or the directory of runs.

    Raises:
        RaypackError: no Ray answers there.
    """
    if address in ("", "local"):
        raise RaypackError(f"--address {address!r}: give HOST:PORT of a Ray head, or auto on one of its nodes")
    run = config.run.model_copy(update={"ray_address": address})
    with connected(config.model_copy(update={"run": run})):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return live_shape(address, nodes, _groups()), _places(config)


def live_shape(address: str, nodes: list[Mapping[str, float]], groups: list[NodeType]) -> ClusterShape:
    """Nodes that are there, and those that `groups` of the autoscaler may add; `least` = what is there now.

    Ray does not say which group a node belongs to: by what they offer, equal ones are taken for the same.
    """
    there = Counter((float(node.get("CPU", 0)), float(node.get("GPU", 0))) for node in nodes)
    types = []
    for group in groups:
        now = there.pop((group.cpus, group.gpus), 0)
        types.append(NodeType(group.name, group.cpus, group.gpus, now, max(now, group.most)))
    for (cpus, gpus), now in sorted(there.items()):
        types.append(NodeType(f"node-{cpus:g}-cpu-{gpus:g}-gpu", cpus, gpus, now, now))
    return ClusterShape(address, tuple(types), sum(kind.most for kind in types), shared=None)


def _groups() -> list[NodeType]:
    """Node types of the cluster's autoscaler; none where it has none, or does not say (autoscaler v1)."""
    try:
        # Where Ray Train itself looks before it waits for workers; Ray has no public name for it.
        from ray._private.state import state

        config: Any = state.get_cluster_config()
    except (ImportError, AttributeError):
        return []
    unlimited = 2**20  # the autoscaler says -1
    return [
        NodeType(
            group.name,
            float(group.resources.get("CPU", 0)),
            float(group.resources.get("GPU", 0)),
            0,
            group.max_count if group.max_count >= 0 else unlimited,
        )
        for group in (config.node_group_configs if config else ())
    ]


def _places(config: Config) -> list[Fault]:
    """Every node is asked for the corpus, and for a file that this process writes for a moment where runs will be."""
    tokens, faults = {}, []
    wanted = {"run.root": absolute(config.run.root)}
    if not config.data.corpus:
        wanted["data.corpus (the default one, below RAYPACK_HOME)"] = raypack_home()
    for key, folder in wanted.items():
        token = next(each for each in (folder, *folder.parents) if each.is_dir()) / f".seen-{uuid.uuid4().hex}"
        try:
            token.touch()
        except OSError as error:
            faults.append(Fault("storage", f"{key}: cannot write below {folder}: {error.strerror}; choose another"))
        else:
            tokens[token] = f"{key}: {folder}"
    try:
        named = {str(token): text for token, text in tokens.items()}
        if config.data.corpus:
            corpus = absolute(config.data.corpus)
            named[str(corpus / HEADER_NAME)] = f"data.corpus: {corpus}"
        return faults + [
            Fault("storage", f"{named[path]} is not seen by node {node}: put it on storage that all nodes share")
            for path, node in _unseen(list(named), config.timeouts.actor).items()
        ]
    finally:
        for token in tokens:
            token.unlink(missing_ok=True)


def _unseen(paths: list[str], timeout: float) -> dict[str, str]:
    """`{path: the first node that does not see it}`.

    Raises:
        RaypackError: a node does not answer.
    """
    found: dict[str, str] = {}
    for name, missing in ask_each_node(_missing, paths, timeout=timeout):
        found.update({path: name for path in missing if path not in found})
    return found


def _missing(paths: list[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]
