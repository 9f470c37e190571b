"""Can a cluster hold a run? Pure comparison of what a run asks for with the node types that a cluster may have.

What Ray itself does with a request that no node type can meet is to wait for ever; here it becomes one line before
anything starts. `clusters.files` and `driver.nodes` say what a cluster is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from raypack.config import Config, TopologySection, load_cluster

EPSILON = 1e-9
#: seconds that a cloud takes for a GPU machine, a container image and its setup; assumed, not measured
BOOT_SECONDS = 300.0


@dataclass(frozen=True)
class NodeType:
    """Machines of one kind: what Ray offers on each, and how many there are at least and at most."""

    name: str
    cpus: float
    gpus: float
    least: int
    most: int

    def holds(self, topology: TopologySection) -> int:
        """Workers that fit on one such node; a worker is never split over two."""
        asked = [(self.cpus, topology.cpus_per_worker), (self.gpus, topology.gpus_per_worker)]
        return min((math.floor(there / each + EPSILON) for there, each in asked if each > 0), default=topology.workers)


@dataclass(frozen=True)
class ClusterShape:
    """What a cluster file (or a live cluster) offers.

    Args:
        source: the file or address, for messages.
        types: the head's among them.
        nodes_max: nodes of all types together, the head included.
        live: it runs, and its nodes themselves are asked for the run's places.
    """

    source: str
    types: tuple[NodeType, ...]
    nodes_max: int
    live: bool = False

    def workers(self, topology: TopologySection, ready: bool = False) -> int:
        """Workers that fit when the cluster is as large as it may be; `ready`: on the nodes that are always there."""
        total = sum(kind.least * kind.holds(topology) for kind in self.types)
        if ready:
            return total
        free = self.nodes_max - sum(kind.least for kind in self.types)
        for kind in sorted(self.types, key=lambda kind: kind.holds(topology), reverse=True):
            more = max(0, min(free, kind.most - kind.least))
            total, free = total + more * kind.holds(topology), free - more
        return total


class Fault(NamedTuple):
    """Why the run cannot work there. `kind`: bundle, capacity, storage or corpus."""

    kind: str
    text: str


@dataclass(frozen=True)
class Report:
    """`fitting` and `ready` count workers: at the cluster's largest, and on the nodes that are always there."""

    source: str
    workers: int
    workers_min: int
    fitting: int
    ready: int
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def check_cluster(config: Config, cluster: ClusterShape) -> Report:
    """Compare a run with a cluster. Every fault is one line: value, limit, what to change.

    Raises:
        RaypackError: `plan.cluster` names no preset or readable file.
    """
    topology = config.topology
    needed = topology.workers_min or topology.workers
    fitting, ready = cluster.workers(topology), cluster.workers(topology, ready=True)
    faults = [*_too_small(topology, needed, fitting, cluster), *_unshared(config, cluster)]
    if unnamed := unnamed_corpus(config):
        faults.append(Fault("corpus", unnamed))
    notes = _notes(config, cluster, needed, fitting, ready)
    return Report(cluster.source, topology.workers, needed, fitting, ready, tuple(faults), tuple(notes))


def unnamed_corpus(config: Config) -> str:
    """The fault of a run that would pay for GPUs to read Python's standard library; "" where there is none."""
    if config.data.corpus or not config.topology.gpus_per_worker:
        return ""
    return (
        f"topology.gpus_per_worker = {config.topology.gpus_per_worker:g} and no data.corpus: the embedded one is for "
        "trials on CPUs; build one (`raypack data build`) and give it as --data.corpus"
    )


def _too_small(topology: TopologySection, needed: int, fitting: int, cluster: ClusterShape) -> Iterator[Fault]:
    if fitting >= needed:
        return
    key = "workers_min" if topology.workers_min else "workers"
    unit = "GPU" if topology.gpus_per_worker else "CPU"
    each = topology.gpus_per_worker or topology.cpus_per_worker
    bundle = _amounts(topology.cpus_per_worker, topology.gpus_per_worker)
    need = (
        f"topology.{key} = {needed}: need {needed * each:g} {unit} in bundles of {bundle}; "
        f"cluster can give {fitting * each:g}"
    )
    able = [kind for kind in cluster.types if kind.holds(topology)]
    if not able:
        largest = max(cluster.types, key=lambda kind: (kind.gpus, kind.cpus))
        yield Fault(
            "bundle",
            f"{need}: no node type holds one bundle (the largest, {largest.name}, has "
            f"{_amounts(largest.cpus, largest.gpus)}); lower topology.cpus_per_worker or gpus_per_worker, or give a "
            "node type more",
        )
        return
    best = max(able, key=lambda kind: kind.holds(topology))
    nodes = math.ceil(needed / best.holds(topology))
    yield Fault(
        "capacity",
        f"{need}: {best.name} holds {best.holds(topology)} bundles a node, and there are at most "
        f"{min(best.most, cluster.nodes_max)} of it; lower topology.{key} to {fitting}, or let there be {nodes} of "
        f"{best.name}",
    )


def _amounts(cpus: float, gpus: float) -> str:
    named = [f"{amount:g} {unit}" for amount, unit in ((cpus, "CPU"), (gpus, "GPU")) if amount]
    return f"({', '.join(named) or '0 CPU'})"


def _unshared(config: Config, cluster: ClusterShape) -> Iterator[Fault]:
    if cluster.live or cluster.nodes_max < 2:
        return
    for key, path in _places(config):
        if path.startswith("~"):
            yield Fault("storage", f"{key} = {path!r} is each node's own: give an absolute path on shared storage")


def _places(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that name what every node must see."""
    yield "run.root", config.run.root
    yield "data.corpus", config.data.corpus
    yield "run.resume", config.run.resume


def _notes(config: Config, cluster: ClusterShape, needed: int, fitting: int, ready: int) -> Iterator[str]:
    """What is no fault, but worth to know before paying for machines."""
    topology = config.topology
    if needed <= fitting < topology.workers:
        yield f"at most {fitting} of topology.workers = {topology.workers} fit: the run never grows beyond that"
    if topology.nodes and cluster.nodes_max > 1:
        yield (
            f"topology.nodes = {list(topology.nodes)} takes the place of the machines: it is for trials on one "
            "machine, leave it out on a cluster"
        )
    expected = load_cluster(config.plan.cluster).ranks_per_node
    held = {kind.name: kind.holds(topology) for kind in cluster.types if kind.most and kind.holds(topology)}
    if held and not topology.nodes and expected not in held.values():
        there = ", ".join(f"{name} {count}" for name, count in held.items())
        yield (
            f"plan.cluster = {config.plan.cluster} has rates of nodes with {expected} ranks, these nodes hold {there}: "
            "measure them with `raypack calibrate` for plans that fit"
        )
    if ready < needed <= fitting and config.timeouts.start < BOOT_SECONDS:
        yield (
            f"{ready} of {needed} workers fit on nodes that are always there: the others boot within timeouts.start = "
            f"{config.timeouts.start:g} s or the start fails; raise it, or min_workers (minReplicas)"
        )
    if not cluster.live and cluster.nodes_max > 1:
        yield (
            "whether all nodes share the storage of runs, corpus and checkpoints no file can say: ask the running "
            "cluster, `raypack cluster check RUN.toml --address HOST:PORT`"
        )
