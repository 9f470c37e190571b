"""Every check of a run that needs no Ray: places, corpus, plan, checkpoint, and the machine where it is alone."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from raypack.checkpoint.state import RunState, check_same
from raypack.clusters.check import unnamed_corpus
from raypack.config import ClusterConfig, Config, ObserveSection, TopologySection, evenly
from raypack.data.corpus import Corpus, check_vocabulary
from raypack.data.default import default_corpus, default_corpus_path
from raypack.data.splits import training_stream
from raypack.data.stream import StreamCounts
from raypack.driver.nodes import too_small
from raypack.driver.ray_cluster import address_of
from raypack.driver.rundir import resolve_run, resume_notes
from raypack.errors import RaypackError
from raypack.files import absolute
from raypack.kernels.attention import find_kernel
from raypack.layers.kinds import kinds_of
from raypack.observe.exporter import Endpoint, Exporter
from raypack.observe.observer import NODE_ADDRESS
from raypack.observe.sinks import find_sink
from raypack.plan.topology import Topology
from raypack.planning.policies import find_policy
from raypack.planning.steps import StepPlanner
from raypack.report.view import RunView

# Workers wait for each other most of the time, so a few may share a core; far more of them only take memory.
WORKERS_PER_CORE, ALWAYS_ALLOWED = 4, 16
# Resident, about: torch and Ray are most of it. What of the memory workers may take.
WORKER_BYTES, USABLE = 0.4e9, 0.8
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check which needs no Ray."""

    config: Config
    corpus: Path
    run_dir: Path
    resume: str | None
    counts: StreamCounts

    @property
    def notes(self) -> list[str]:
        """What a reader of the summary must know."""
        counts, data, nodes = self.counts, self.config.data, self.config.topology.nodes
        notes = [
            f"{counts.samples} samples an epoch; {counts.truncated} truncated to {data.max_sample_tokens} tokens, "
            f"{counts.skipped_long} longer and {counts.skipped_short} of one token skipped"
        ]
        if nodes:
            notes.append(f"nodes are simulated: topology.nodes = {list(nodes)} in place of the machines")
        if self.resume is not None:
            notes.append(f"resumed from {self.resume}")
        return [*notes, *resume_notes(self.config)]

    @property
    def fates(self) -> dict[str, int]:
        """Documents of an epoch by what the length rules do to them (`observe.metrics.FATES`)."""
        counts = self.counts
        return {
            "kept": counts.samples - counts.truncated,
            "truncated": counts.truncated,
            "skipped_long": counts.skipped_long,
            "skipped_short": counts.skipped_short,
        }


def prepare_run(config: Config, view: RunView | None = None) -> Prepared:
    """Every check that needs no Ray; writes nothing but, on first use, the default corpus."""
    bar = view is None  # else the view has a spinner
    view = view or RunView(Console(quiet=True), config.run.steps)
    check_corpus_named(config)
    check_names(config)
    if not address_of(config):
        check_machine(config)
    run_dir, resume = resolve_run(config)
    built = not config.data.corpus and not default_corpus_path().exists()
    with view.phase("corpus", "the embedded one is built, once" if built else "") as said:
        path = absolute(config.data.corpus) if config.data.corpus else default_corpus(progress=bar)
        corpus = Corpus.open(path)
        documents, tokens = corpus.header.documents, corpus.header.tokens
        said.append(f"{path} {'built' if built else 'found'}: {documents:,} documents, {tokens:,} tokens")
    with view.phase("checks") as said:
        counts = check_plan(config, corpus)
        if resume is not None:
            check_checkpoint(resume, config, corpus)
        run = Prepared(config, path, run_dir, resume, counts)
        said.extend(run.notes)
    return run


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
            raise too_small(topology, "GPU", there, "this machine")
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


def cores() -> int:
    """Cores that this process may use; a container's share is rounded up."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return min(there, -(-int(quota) // int(period)))  # "max" is no integer
    return there


def memory_bytes() -> int:
    """Memory of the machine, or of the container where that has less."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(there, int((CGROUP / "memory.max").read_text()))
    return there


def check_names(config: Config) -> None:
    """Raises RaypackError where `model.own_layers`, `plan.policy`, `train.kernel` or one of `observe.sinks` names
    nothing."""
    kinds_of(config.model)
    find_policy(config.plan.policy, "plan.policy")
    find_kernel(config.train.kernel)
    for name in config.observe.all_sinks:
        find_sink(name)
