"""What every Ray Train worker runs: set up once, then step after step, reporting as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.data.loader import load_rows
from raypack.data.splits import training_stream
from raypack.errors import RaypackError
from raypack.model.stopwatch import Stopwatch
from raypack.observe.reporter import Reporter
from raypack.observe.trace import recording, write_trace
from raypack.parallel.agreement import agree, digest_of
from raypack.parallel.groups import Groups
from raypack.parallel.ledger import Ledger
from raypack.parallel.places import topology_of
from raypack.parallel.topology import Topology
from raypack.parallel.wire import Wire
from raypack.planning.plan import Plan, StreamState
from raypack.planning.planner import plan_cluster
from raypack.training.checkpoint import RunState, load, model_digest, save
from raypack.training.ending import is_echo
from raypack.training.feed import Feed, PlanSource
from raypack.training.optimizer import build_optimizer
from raypack.training.parameters import build_parameters
from raypack.training.peak import matmul_rate
from raypack.training.replicas import check_replicas
from raypack.training.report import Reports
from raypack.training.rundir import keep_plan
from raypack.training.step import StepResult, Trainer, evaluate_loss, train_step
from raypack.training.work import StepWork, prepare
from raypack.version import code_version

# A rank that only lost another one fails this much later than it noticed: the run's reason is the cause, not its echo.
ECHO_SECONDS = 3.0
# How long a rank that is done, or failed, waits for its last reports to be on record.
REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class WorkerSettings:
    """What the driver hands to every worker; plain data and actor handles. `resume` = a checkpoint, "" = none."""

    config: Config
    corpus: str
    run_dir: str
    planner: Any
    observer: Any
    attempt: int
    resume: str


@dataclass
class Run:
    """One worker's view of the run."""

    config: Config
    run_dir: Path
    topology: Topology
    rank: int
    corpus: Corpus
    trainer: Trainer
    source: PlanSource

    @property
    def host(self) -> dist.ProcessGroup | None:
        """CPU group of all ranks; None in a world of one."""
        return self.trainer.groups.host if self.trainer.groups is not None else None


def train_worker(arguments: dict[str, Any]) -> None:
    """The train loop of one worker (Ray Train has initialised the process group)."""
    settings: WorkerSettings = arguments["settings"]
    reporter = Reporter(settings.observer)
    try:
        _train(settings, reporter)
    except Exception as error:
        if is_echo(error):
            time.sleep(ECHO_SECONDS)
        raise
    finally:
        reporter.close(min(REPORT_SECONDS, settings.config.timeouts.actor))


def _train(settings: WorkerSettings, reporter: Reporter) -> None:
    run = _set_up(settings)
    config = run.config
    step, stream = _start(run, settings.resume)
    held_out = _held_out(run)
    reports = _reports(run)
    feed = Feed(run.source, _preparing(run, keep=config.plan.keep), step, stream, config.run.steps)
    try:
        while step < config.run.steps:
            started = time.perf_counter()
            fed = feed.next()
            with recording(step == config.observe.trace) as trace:
                result = train_step(run.trainer, fed.work, fed.trouble)
            seconds = time.perf_counter() - started
            if trace is not None:
                write_trace(trace, run.run_dir, step, run.rank, run.topology, run.host)
            step += 1
            assert fed.work is not None
            stream = fed.work.plan.after or stream
            heldout_loss = _evaluate(run, held_out, step, result)
            _checkpoint(run, step, stream, result)
            reporter.send(reports.make(fed, result, seconds, heldout_loss))
    finally:
        feed.close()
    agree(run.host, bytes(32), "the end of the run")


def _set_up(settings: WorkerSettings) -> Run:
    config, rank = settings.config, dist.get_rank()
    device = ray.train.torch.get_device() if config.topology.gpus_per_worker > 0 else torch.device("cpu")
    topology = _topology(config)
    groups = Groups(topology, device, config.timeouts.collective)
    corpus, identity = _same_everywhere(groups, settings)
    parameters = build_parameters(config.model, config.train, config.run.seed, groups, device)
    trainer = Trainer(
        parameters=parameters,
        optimizer=build_optimizer(parameters.masters, config.train),
        train=config.train,
        steps=config.run.steps,
        wire=Wire(groups, Ledger(topology, rank)),
        groups=groups,
        device=device,
        identity=identity,
        attempt=settings.attempt,
        watch=Stopwatch(device),
    )
    source = PlanSource(settings.planner, settings.attempt, topology, config.timeouts.plan)
    return Run(config, Path(settings.run_dir), topology, rank, corpus, trainer, source)


def _same_everywhere(groups: Groups, settings: WorkerSettings) -> tuple[Corpus, bytes]:
    """The corpus, and the digest of all that every rank must have alike: code, settings and corpus.

    Raises:
        RaypackError: on all ranks, where one has something else, or cannot read the corpus.
    """
    corpus, trouble = None, None
    try:
        corpus = Corpus.open(settings.corpus)
    except RaypackError as error:
        trouble = str(error)
    code, config = code_version(), digest_of(settings.config.model_dump_json()).hex()
    prints = corpus.fingerprint if corpus is not None else ""
    identity = digest_of(code, config, prints)
    agree(groups.host, identity, f"code {code[:12]}, settings {config[:12]}, corpus {prints[:12]}", trouble)
    assert corpus is not None
    return corpus, identity


def _topology(config: Config) -> Topology:
    """Of the machines, or of the run file where it overrides them."""
    here = (ray.get_runtime_context().get_node_id(), ray.train.get_context().get_local_rank())
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, here)
    found = topology_of(places)
    return Topology(config.topology.nodes) if config.topology.nodes else found


def _start(run: Run, resume: str) -> tuple[int, StreamState]:
    """Step and stream state to begin at: the run's start, or the checkpoint's."""
    if not resume:
        return 0, training_stream(run.corpus, run.config.data).start
    state = load(run.trainer, Path(resume))
    check_replicas(run.trainer, state.step)
    return state.step, state.stream


def _preparing(run: Run, *, keep: bool) -> Callable[[Plan], StepWork]:
    """From a plan to this rank's work; with `keep` rank 0 writes the plan to the run directory on the way."""
    work_of = partial(
        prepare, topology=run.topology, rank=run.rank, model=run.config.model, load=partial(load_rows, run.corpus)
    )
    if not keep or run.rank != 0:
        return work_of

    def kept(plan: Plan) -> StepWork:
        keep_plan(run.run_dir, plan)
        return work_of(plan)

    return kept


def _held_out(run: Run) -> StepWork | None:
    """The work of one evaluation; None where there is nothing to evaluate."""
    if not run.config.train.eval_every:
        return None
    work, trouble = None, None
    try:
        plan = run.source.held_out()
        work = _preparing(run, keep=False)(plan) if plan is not None else None
    except RaypackError as error:
        trouble = str(error)
    digest = work.plan.digest if work is not None else bytes(32)
    agree(run.host, digest, "the plan of the held-out samples", trouble)
    return work


def _reports(run: Run) -> Reports:
    device = run.trainer.device
    if device.type == "cpu":
        groups = run.trainer.groups
        peak = matmul_rate(groups.world if groups is not None else None, torch.float32)
        source = "matrix products measured at start, all ranks at once"
    else:
        cluster = plan_cluster(run.config)
        peak, source = cluster.peak_flops, f"cluster preset {cluster.name}"
    return Reports(run.trainer, run.topology, run.rank, peak, source)


def _evaluate(run: Run, held_out: StepWork | None, step: int, result: StepResult) -> float | None:
    """After every `eval_every` steps and after the last."""
    every = run.config.train.eval_every
    if held_out is None or (step % every and step != run.config.run.steps):
        return None
    started = time.perf_counter()
    wire = run.trainer.wire
    ledger, wire.ledger = wire.ledger, Ledger(run.topology, run.rank)  # a step's bytes are its own
    loss = evaluate_loss(run.trainer, held_out)
    wire.ledger = ledger
    result.phases["evaluate"] = time.perf_counter() - started
    return loss


def _checkpoint(run: Run, step: int, stream: StreamState, result: StepResult) -> None:
    """After every `checkpoint_every` steps and after the last."""
    every = run.config.train.checkpoint_every
    if step != run.config.run.steps and not (every and step % every == 0):
        return
    started = time.perf_counter()
    check_replicas(run.trainer, step)
    state = RunState(step, stream, model_digest(run.config.model), run.corpus.fingerprint)
    save(run.trainer, run.run_dir, state, run.config.train.checkpoint_keep)
    result.phases["checkpoint"] = time.perf_counter() - started
