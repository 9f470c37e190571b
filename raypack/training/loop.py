"""An attempt: one world of ranks, from its start or a checkpoint to the last step, or until it is asked to leave.

Nothing here knows Ray: `driver.worker` runs it inside Ray Train, tests inside plain processes that they kill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raypack.checkpoint.addresses import store_of
from raypack.checkpoint.checkpoints import Checkpoints, load
from raypack.checkpoint.state import RunState, check_same, newest
from raypack.checkpoint.storage import Store
from raypack.comm.agreement import agree, digest_of
from raypack.comm.faults import is_echo, is_timeout
from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.data.loader import load_rows
from raypack.data.splits import training_stream
from raypack.errors import Leaving, LostRank, RaypackError
from raypack.model.stopwatch import Stopwatch
from raypack.observe.attempts import AttemptLog
from raypack.observe.record import RankReport
from raypack.observe.run_files import keep_plan
from raypack.observe.trace import recording, write_trace
from raypack.plan.plan import Plan, StreamState
from raypack.plan.topology import Topology
from raypack.planning.steps import plan_cluster
from raypack.training.feed import Feed, Plans
from raypack.training.parameters import build_optimizer, build_parameters
from raypack.training.peak import matmul_rate
from raypack.training.progress import Progress
from raypack.training.replicas import check_replicas
from raypack.training.reports import Reports
from raypack.training.step import StepResult, Trainer, evaluate_loss, train_step
from raypack.training.work import StepWork, prepare
from raypack.version import code_version


@dataclass(frozen=True)
class Job:
    """What a run is, the same on every rank and in every attempt; plain data.

    `resume` = the checkpoint that attempt `first_attempt` starts from, "" = none; later ones start from the newest.
    """

    config: Config
    corpus: str
    run_dir: str
    resume: str = ""
    first_attempt: int = 0


@dataclass(frozen=True)
class Seat:
    """What surrounds one rank of an attempt.

    `plans` makes the source of plans of a topology; `send` takes a report and returns at once, and may keep it until
    `flush`; `on_record` returns when a step of this attempt is on record, or cannot be waited for any longer;
    `save_failed` takes why a checkpoint could not be written, and returns at once.
    """

    topology: Topology
    device: torch.device
    progress: Progress
    plans: Callable[[Topology], Plans]
    send: Callable[[RankReport], None]
    flush: Callable[[], None]
    on_record: Callable[[int], None]
    save_failed: Callable[[str], None] = lambda reason: None


@dataclass
class Run:
    """One rank's view of the attempt."""

    config: Config
    run_dir: Path
    topology: Topology
    rank: int
    corpus: Corpus
    trainer: Trainer
    source: Plans
    store: Store
    checkpoints: Checkpoints

    @property
    def host(self) -> dist.ProcessGroup | None:
        """CPU group of all ranks; None in a world of one."""
        return self.trainer.groups.host if self.trainer.groups is not None else None


def train(job: Job, seat: Seat) -> None:
    """Run the attempt to the run's last step. The default process group is there.

    Raises:
        RaypackError: on all ranks, with the reason.
        LostRank: another rank is gone or stuck.
        Leaving: on all ranks, after a checkpoint, because one was asked to leave.
    """
    try:
        with _waits_named(job.config, seat.progress):
            run = _set_up(job, seat)
            try:
                _steps(run, job, seat)
            finally:
                run.checkpoints.close()
    finally:
        seat.progress.over = True


def _steps(run: Run, job: Job, seat: Seat) -> None:
    config, progress = run.config, seat.progress
    step, stream = _start(run, job)
    first = step
    held_out = _held_out(run)
    reports = _reports(run)
    feed = Feed(run.source, _preparing(run, keep=config.plan.keep), step, stream, config.run.steps)
    try:
        while step < config.run.steps:
            started = time.perf_counter()
            progress.enter("plan_wait", step)
            fed = feed.next()
            trouble = fed.trouble or run.checkpoints.trouble
            with recording(step == config.observe.trace) as trace:
                result = train_step(run.trainer, fed.work, trouble, leave=bool(progress.asked))
            seconds = time.perf_counter() - started
            if trace is not None:
                write_trace(trace, run.run_dir, step, run.rank, run.topology, run.host)
            step += 1
            assert fed.work is not None
            stream = fed.work.plan.after or stream
            heldout_loss = _evaluate(run, held_out, step, result)
            due = _checkpoint_is_due(config, step)
            if due:
                _checkpoint(run, step, stream, result)
            seat.send(reports.make(fed, result, seconds, heldout_loss))
            if due:
                seat.flush()  # it becomes visible when its steps are on record
    except Leaving:
        seat.flush()
        if step > first:
            _leave(run, step, stream)
        raise
    finally:
        feed.close()
    progress.enter("checkpoint", step)
    run.checkpoints.settle(config.timeouts.collective)


def _set_up(job: Job, seat: Seat) -> Run:
    config, topology, rank = job.config, seat.topology, dist.get_rank()
    limit = config.timeouts.collective
    seat.progress.enter("groups")
    groups = Groups(topology, seat.device, limit)
    corpus, identity = _same_everywhere(groups, job)
    seat.progress.enter("model")
    parameters = build_parameters(config.model, config.train, config.run.seed, groups, seat.device)
    trainer = Trainer(
        parameters=parameters,
        optimizer=build_optimizer(parameters.masters, config.train),
        train=config.train,
        steps=config.run.steps,
        wire=Wire(groups, Ledger(topology, rank)),
        groups=groups,
        device=seat.device,
        identity=identity,
        attempt=seat.progress.attempt,
        watch=Stopwatch(seat.device),
        progress=seat.progress,
    )
    seat.progress.inside = lambda: trainer.wire.inside
    store = store_of(config, Path(job.run_dir))

    def recorded(step: int) -> None:
        """What a checkpoint makes final must be on record: a later attempt does not do it again."""
        seat.on_record(step - 1)

    checkpoints = Checkpoints(
        trainer, store, config.train.checkpoint_keep, recorded, on_failure=seat.save_failed, timeout=limit
    )
    source = seat.plans(topology)
    return Run(config, Path(job.run_dir), topology, rank, corpus, trainer, source, store, checkpoints)


def _same_everywhere(groups: Groups, job: Job) -> tuple[Corpus, bytes]:
    """The corpus, and the digest of all that every rank must have alike: code, settings and corpus.

    Raises:
        RaypackError: on all ranks, where one has something else, or cannot read the corpus.
    """
    corpus, trouble = None, None
    try:
        corpus = Corpus.open(job.corpus)
    except RaypackError as error:
        trouble = str(error)
    code, config = code_version(), digest_of(job.config.model_dump_json()).hex()
    prints = corpus.fingerprint if corpus is not None else ""
    identity = digest_of(code, config, prints)
    agree(groups.host, identity, f"code {code[:12]}, settings {config[:12]}, corpus {prints[:12]}", trouble)
    assert corpus is not None
    return corpus, identity


def _start(run: Run, job: Job) -> tuple[int, StreamState]:
    """Step and stream state to begin at: a checkpoint's, or the run's start."""
    attempt = run.trainer.attempt
    found: list[Any] = [None]
    notes: list[str] = []
    trouble = None
    if run.rank == 0:
        try:
            found[0] = job.resume
            if attempt != job.first_attempt:
                own, notes = newest(run.store)
                found[0] = own or job.resume
        except RaypackError as error:
            trouble = str(error)
    agree(run.host, bytes(32), "where to go on", trouble)
    if run.host is not None:
        dist.broadcast_object_list(found, src=0, group=run.host)
    if run.rank == 0 and (found[0] or attempt != job.first_attempt):
        goes_on = "; ".join([found[0] or "the run's start", *notes])
        AttemptLog(run.run_dir).add("resumed", attempt, reason=goes_on)
    if not found[0]:
        return 0, training_stream(run.corpus, run.config.data).start
    run.trainer.progress.enter("load")
    state = load(run.trainer, found[0])
    check_same(found[0], state, run.config, run.corpus.fingerprint)
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
    run.trainer.progress.enter("held_out_plan")
    work, trouble = None, None
    try:
        plan = run.source.held_out()
        work = _preparing(run, keep=False)(plan) if plan is not None else None
    except RaypackError as error:
        trouble = str(error)
    digest = work.plan.digest if work is not None else bytes(32)
    labels = (work.labels, work.plan.labels) if work is not None else (0, 0)
    agree(run.host, digest, "the plan of the held-out samples", trouble, labels=labels)
    return work


def _reports(run: Run) -> Reports:
    device = run.trainer.device
    if device.type == "cpu":
        run.trainer.progress.enter("peak")
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
    run.trainer.progress.enter("evaluate")
    wire = run.trainer.wire
    ledger, wire.ledger = wire.ledger, Ledger(run.topology, run.rank)  # a step's bytes are its own
    loss = evaluate_loss(run.trainer, held_out)
    wire.ledger = ledger
    result.phases["evaluate"] = time.perf_counter() - started
    return loss


def _checkpoint_is_due(config: Config, step: int) -> bool:
    """After every `checkpoint_every` steps and after the last."""
    every = config.train.checkpoint_every
    return step == config.run.steps or bool(every and step % every == 0)


def _checkpoint(run: Run, step: int, stream: StreamState, result: StepResult | None = None) -> None:
    """Start to write one; the phase has how long the step stood still for it."""
    started = time.perf_counter()
    run.trainer.progress.enter("checkpoint")
    check_replicas(run.trainer, step)
    run.checkpoints.save(RunState.of(run.config, run.corpus.fingerprint, step, stream))
    if result is not None:
        result.phases["checkpoint"] = time.perf_counter() - started


def _leave(run: Run, step: int, stream: StreamState) -> None:
    """Nothing of the steps done is lost: the state after the last one is on storage when this returns."""
    progress = run.trainer.progress
    progress.enter("checkpoint", step)
    if run.checkpoints.step != step:
        _checkpoint(run, step, stream)
    run.checkpoints.settle(run.config.timeouts.collective)


@contextmanager
def _waits_named(config: Config, progress: Progress) -> Iterator[None]:
    """What torch says of a rank that is gone or late names neither the step nor who waited."""
    try:
        yield
    except RuntimeError as error:
        where = f"rank {dist.get_rank()} waited in {progress.phase} of step {progress.step}"
        if is_timeout(error):
            limit = config.timeouts.collective
            raise LostRank(f"{where}: another rank did not come within timeouts.collective = {limit:g} s") from error
        if is_echo(error):
            raise LostRank(f"{where}, and lost another rank") from error
        raise
