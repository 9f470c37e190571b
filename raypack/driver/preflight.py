"""Checks before anything starts: what the plan needs, what the cluster has, and paths that every node must see."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
import torch

from raypack.checkpoint.state import RunState, check_same
from raypack.clusters.check import unnamed_corpus
from raypack.config import ClusterConfig, Config, ObserveSection, TopologySection, evenly
from raypack.data.corpus import Corpus, check_vocabulary
from raypack.data.splits import training_stream
from raypack.data.stream import StreamCounts
from raypack.driver.each_node import ask_each_node
from raypack.driver.machine import cores, memory_bytes
from raypack.errors import RaypackError
from raypack.kernels.attention import find_kernel
from raypack.observe.exporter import Endpoint, Exporter
from raypack.observe.observer import NODE_ADDRESS
from raypack.observe.sinks import find_sink
from raypack.plan.topology import Topology
from raypack.planning.policies import find_policy
from raypack.planning.steps import StepPlanner
from raypack.registry import is_foreign, source_digest

EPSILON = 1e-9
# Workers wait for each other most of the time, so a few may share a core; far more of them only take memory.
WORKERS_PER_CORE, ALWAYS_ALLOWED = 4, 16
# Resident, about: torch and Ray are most of it. What of the memory workers may take.
WORKER_BYTES, USABLE = 0.4e9, 0.8


def check_corpus_named(config: Config) -> None:
    """Raises RaypackError where GPUs would train on the embedded corpus."""
    if text := unnamed_corpus(config):
        raise RaypackError(text)


def planned_topology(config: Config, cluster: ClusterConfig, world: int) -> Topology:
    """The nodes that `world` ranks are expected on, before any machine is seen."""
    nodes = config.topology.nodes
    return Topology(nodes) if nodes else Topology.regular(world, cluster.ranks_per_node)


def check_plan(config: Config, corpus: Corpus) -> StreamCounts:
    """Prove that the longest sample can be planned at the smallest and the largest world, without Ray.

    Returns what the length rules do to an epoch.

    Raises:
        RaypackError: token ids that the model lacks, no usable document, or a sample that fits no block.
    """
    check_vocabulary(corpus, config.model.vocabulary)
    counts = training_stream(corpus, config.data).counts
    planner = StepPlanner(config, corpus)
    for world in dict.fromkeys((config.topology.workers, config.topology.least)):
        planner.check_longest(planned_topology(config, planner.cluster, world))
    return counts


def check_checkpoint(address: str, config: Config, corpus: Corpus) -> None:
    """Raises RaypackError where the run cannot go on from the checkpoint at `address`, a path or URL."""
    state = RunState.read(address)
    check_same(address, state, config, corpus.fingerprint)
    if state.step >= config.run.steps:
        raise RaypackError(
            f"{address} has {state.step} steps already, run.steps = {config.run.steps}: nothing is left to do; raise "
            "run.steps"
        )


def check_machine(config: Config) -> None:
    """What a Ray of the run's own would find out much later, on this machine.

    Raises:
        RaypackError: fewer GPUs than the workers ask for, far too few cores or too little memory for so many workers,
            or a port or address that /metrics cannot be served at.
    """
    topology, observe = config.topology, config.observe
    if topology.gpus_per_worker > 0:
        there = torch.cuda.device_count()
        if topology.least * topology.gpus_per_worker > there:
            raise _too_small(topology, "GPU", there, "this machine")
    _check_size(topology)
    default = ObserveSection()
    if observe.bind != NODE_ADDRESS and (observe.port, observe.bind) != (default.port, default.bind):
        Endpoint(Exporter("probe"), observe.bind, observe.port).close()


def _check_size(topology: TopologySection) -> None:
    """That a local Ray with all these workers leaves the machine usable."""
    there, each = cores(), topology.cpus_per_worker
    allowed = max(ALWAYS_ALLOWED, WORKERS_PER_CORE * there)
    if topology.workers * each > allowed:
        raise _too_many(
            topology,
            f"of {each:g} CPU each on this machine's {there} cores",
            f"{WORKERS_PER_CORE} a core, and {ALWAYS_ALLOWED} in any case, can share them",
            math.floor(allowed / each),
        )
    memory = USABLE * memory_bytes()
    if topology.workers * WORKER_BYTES > memory:
        raise _too_many(
            topology,
            f"take about {topology.workers * WORKER_BYTES / 1e9:.0f} GB, {WORKER_BYTES / 1e9:g} each",
            f"this machine has {memory / 1e9:.0f} GB to spare for them",
            math.floor(memory / WORKER_BYTES),
        )


def _too_many(topology: TopologySection, ask: str, limit: str, fitting: int) -> RaypackError:
    lower = f"--topology.workers {fitting}"
    if topology.nodes and fitting:
        lower += f' --topology.nodes "{evenly(fitting, len(topology.nodes))}"'
    return RaypackError(
        f"topology.workers = {topology.workers} {ask}: {limit}; give "
        f"{f'{lower} or less' if fitting else 'a lower topology.cpus_per_worker'}, or name a Ray cluster "
        "(run.ray_address)"
    )


def check_resources(topology: TopologySection) -> None:
    """Raises RaypackError where the cluster, as it is or as far as it may grow, cannot hold the least workers."""
    bundle = {"CPU": topology.cpus_per_worker, "GPU": topology.gpus_per_worker}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    limits = _autoscaler_limits()
    for name, each in bundle.items():
        there = sum(node.get(name, 0.0) for node in nodes)
        if topology.least * each > max(there, limits.get(name, 0.0)) + EPSILON:
            raise _too_small(topology, name, there, "the Ray cluster")
    fitting = workers_that_fit(bundle, nodes)
    if fitting < topology.least and not limits:
        wanted = " and ".join(f"{each:g} {name}" for name, each in bundle.items() if each)
        raise RaypackError(
            f"{_least(topology)} of {wanted} on one node each: the nodes of the Ray cluster hold "
            f"{fitting} of them; lower {_least(topology).split()[0]} or what a worker asks for, or add nodes"
        )


def _too_small(topology: TopologySection, name: str, there: float, where: str) -> RaypackError:
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


def workers_that_fit(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many bundles fit on the nodes; a bundle is never split over two."""
    asked = {name: each for name, each in bundle.items() if each > 0}
    if not asked:
        return 2**31
    return sum(min(math.floor(node.get(name, 0.0) / each + EPSILON) for name, each in asked.items()) for node in nodes)


def _autoscaler_limits() -> Mapping[str, float]:
    """The most the cluster's autoscaler may start, by resource; empty where the cluster does not grow."""
    try:
        # What Ray Train itself asks before it waits for workers; Ray has no public name for it.
        from ray._private.state import state

        return state.get_max_resources_from_cluster_config() or {}
    except (ImportError, AttributeError):
        return {}


def check_names(config: Config) -> None:
    """Raises RaypackError where `plan.policy`, `train.kernel` or one of `observe.sinks` names nothing."""
    find_policy(config.plan.policy, "plan.policy")
    find_kernel(config.train.kernel)
    for name in config.observe.all_sinks:
        find_sink(name)


def check_names_everywhere(config: Config, timeout: float) -> None:
    """On every node: what the run takes from outside raypack can be imported, and is the same source.

    Raises:
        RaypackError: names the node and the object.
    """
    names = [n for n in (config.plan.policy, config.train.kernel, *config.observe.all_sinks) if is_foreign(n)]
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


def check_places(run_dir: Path, corpus: Path, timeout: float) -> None:
    """On every node: the corpus can be read and the run directory is the same one.

    Raises:
        RaypackError: names the node and the path.
    """
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return
    token = run_dir / f".seen-{uuid.uuid4().hex}"
    token.touch()
    try:
        for name, missing in ask_each_node(_look, [str(token), str(corpus / "corpus.json")], timeout=timeout):
            if missing:
                raise RaypackError(
                    f"node {name} does not see {Path(missing).parent}: put run.root and data.corpus on storage that "
                    "all nodes share"
                )
    finally:
        token.unlink(missing_ok=True)


def _look(paths: list[str]) -> str:
    """The first of the paths that this node does not see."""
    return next((path for path in paths if not os.path.exists(path)), "")
