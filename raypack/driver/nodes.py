"""What the nodes of a running Ray cluster hold and see: asked before a run starts, and by `raypack cluster check`."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypack.checkpoint.addresses import open_store, store_of
from raypack.checkpoint.storage import reason
from raypack.clusters.check import EPSILON, ClusterShape, Fault, NodeType
from raypack.config import Config, TopologySection
from raypack.data.corpus import HEADER_NAME
from raypack.driver.ray_cluster import connected
from raypack.driver.ray_internals import autoscaler_limits, autoscaler_nodes
from raypack.errors import RaypackError
from raypack.files import absolute, raypack_home
from raypack.registry import is_foreign, source_digest


def ask_each_node(question: Callable[..., Any], *arguments: Any, timeout: float) -> Iterator[tuple[str, Any]]:
    """Run `question(*arguments)` on each living node, on all at once; yields (node's address, answer).

    Raises:
        RaypackError: a node does not answer within `timeout` seconds.
    """
    remote = ray.remote(num_cpus=0)(question)
    asked = [
        (
            node["NodeManagerAddress"],
            remote.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(*arguments),
        )
        for node in _living()
    ]  # fmt: skip
    for name, answer in asked:
        try:
            yield name, ray.get(answer, timeout=timeout)
        except ray.exceptions.RayError as error:
            line = str(error).splitlines()[0]
            raise RaypackError(f"node {name} did not answer within timeouts.actor = {timeout:g} s: {line}") from None


def _living() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def check_resources(topology: TopologySection) -> None:
    """Raises RaypackError where the cluster, as it is or as far as it may grow, cannot hold the least workers."""
    bundle = {"CPU": topology.cpus_per_worker, "GPU": topology.gpus_per_worker}
    nodes = [node["Resources"] for node in _living()]
    limits = autoscaler_limits()
    for name, each in bundle.items():
        there = sum(node.get(name, 0.0) for node in nodes)
        if topology.least * each > max(there, limits.get(name, 0.0)) + EPSILON:
            raise too_small(topology, name, there, "the Ray cluster")
    fitting = live_shape("", nodes, []).workers(topology)
    if fitting < topology.least and not limits:
        wanted = " and ".join(f"{each:g} {name}" for name, each in bundle.items() if each)
        raise RaypackError(
            f"{_least(topology)} of {wanted} on one node each: the nodes of the Ray cluster hold "
            f"{fitting} of them; lower {_least(topology).split()[0]} or what a worker asks for, or add nodes"
        )


def too_small(topology: TopologySection, name: str, there: float, where: str) -> RaypackError:
    """The error where `where` has `there` of the resource `name`, and the least workers need more."""
    each = topology.cpus_per_worker if name == "CPU" else topology.gpus_per_worker
    change = f"lower {_least(topology).split()[0]} or topology.{name.lower()}s_per_worker, or give more machines"
    if name == "GPU" and not there:
        change = (
            "set topology.gpus_per_worker = 0 for workers on CPUs, or take a Ray cluster with GPUs (docs/cluster.md)"
        )
    return RaypackError(
        f"{_least(topology)} need {topology.least * each:g} {name} ({each:g} each), {where} has {there:g}: {change}"
    )


def _least(topology: TopologySection) -> str:
    return f"topology.workers{'_min' if topology.elastic else ''} = {topology.least}"


def check_places(run_dir: Path, corpus: Path, timeout: float) -> None:
    """On every node: the corpus can be read and the run directory is the same one.

    Raises:
        RaypackError: names the node and the path.
    """
    if len(_living()) < 2:
        return
    token = run_dir / f".seen-{uuid.uuid4().hex}"
    token.touch()
    try:
        unseen = _unseen([str(token), str(corpus / HEADER_NAME)], timeout)
        if unseen:
            path, node = next(iter(unseen.items()))
            raise RaypackError(
                f"node {node} does not see {Path(path).parent}: put run.root and data.corpus on storage that "
                "all nodes share"
            )
    finally:
        token.unlink(missing_ok=True)


def check_storage(config: Config, run_dir: Path, timeout: float) -> None:
    """Write and remove a small file where `train.checkpoint_root` says, which every node of the Ray cluster looks for;
    nothing to do for the default.

    Raises:
        RaypackError: it cannot be written, or names the node that does not see it.
    """
    if not config.train.checkpoint_root:
        return
    store = store_of(config, run_dir)
    with store.probed() as probe:
        if not ray.is_initialized() or len(_living()) < 2:
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
        nodes = [node["Resources"] for node in _living()]
        return live_shape(address, nodes, autoscaler_nodes()), _unseen_places(config)


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
    return ClusterShape(address, tuple(types), sum(kind.most for kind in types), live=True)


def _unseen_places(config: Config) -> list[Fault]:
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


def check_names_everywhere(config: Config, timeout: float) -> None:
    """On every node: what the run takes from outside raypack can be imported, and is the same source.

    Raises:
        RaypackError: names the node and the object.
    """
    given = (*config.model.own_kinds.values(), config.plan.policy, config.train.kernel, *config.observe.all_sinks)
    names = [name for name in given if is_foreign(name)]
    if not names:
        return
    own = _sources(names)
    for node, found in ask_each_node(_sources, names, timeout=timeout):
        for name in names:
            if found[name] == own[name]:
                continue
            trouble = found[name] if " " in found[name] else f"{name} is another version than the driver has"
            raise RaypackError(
                f"node {node}: {trouble}; install it on every node, or send it along (`ray job submit --working-dir`)"
            )


def _sources(names: Sequence[str]) -> dict[str, str]:
    """Of each object the digest of its source, or why there is none, which has spaces."""
    found = {}
    for name in names:
        try:
            found[name] = source_digest(name)
        except RaypackError as error:
            found[name] = str(error)
    return found
