"""What every Ray Train worker runs: set up once, then step after step, reporting as it goes."""

from __future__ import annotations

import hashlib
import resource
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
import torch.distributed as dist

from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.data.loader import load_rows
from raypack.data.splits import training_stream
from raypack.errors import RaypackError
from raypack.observe.observer import send
from raypack.observe.record import RankReport, StepFacts
from raypack.parallel.agreement import agree, digest_of
from raypack.parallel.groups import Groups
from raypack.parallel.ledger import Ledger
from raypack.parallel.places import topology_of
from raypack.parallel.topology import Topology
from raypack.parallel.wire import Wire
from raypack.planning.plan import StreamState
from raypack.planning.planner import plan_cluster
from raypack.training.checkpoint import RunState, load, save
from raypack.training.feed import Fed, Feed, PlanSource
from raypack.training.optimizer import build_optimizer
from raypack.training.parameters import build_parameters
from raypack.training.peak import matmul_rate
from raypack.training.step import StepResult, Trainer, evaluate_loss, train_step
from raypack.training.work import StepWork, prepare
from raypack.version import code_version


@dataclass(frozen=True)
class WorkerSettings:
    """What the driver hands to every worker; plain data and actor handles."""

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

    settings: WorkerSettings
    config: Config
    topology: Topology
    rank: int
    corpus: Corpus
    trainer: Trainer
    source: PlanSource
    fingerprint: str
    model_digest: str
    peak_flops: float
    peak_source: str


def train_worker(arguments: dict[str, Any]) -> None:
    """The train loop of one worker (Ray Train has initialised the process group)."""
    settings: WorkerSettings = arguments["settings"]
    run = _set_up(settings)
    step, stream = _start(run)
    config, source = run.config, run.source
    work_of = partial(prepare, topology=run.topology, rank=run.rank, model=config.model, load=_loader(run.corpus))
    feed = Feed(source, work_of, step, stream, config.run.steps)
    held_out = _held_out(run, work_of)
    try:
        while step < config.run.steps:
            started = time.perf_counter()
            fed = feed.next()
            result = train_step(run.trainer, fed.work, fed.trouble)
            seconds = time.perf_counter() - started
            step += 1
            assert fed.work is not None
            heldout_loss = _evaluate(run, held_out, step, result)
            stream = fed.work.plan.after or stream
            _checkpoint(run, step, stream, result)
            send(settings.observer, _report(run, fed, result, seconds, heldout_loss))
    finally:
        feed.close()
    agree(run.trainer.groups and run.trainer.groups.host, bytes(32), "the end of the run")


def _set_up(settings: WorkerSettings) -> Run:
    config = settings.config
    rank = dist.get_rank()
    device = ray.train.torch.get_device() if config.topology.gpus_per_worker > 0 else torch.device("cpu")
    topology = _topology(config)
    groups = Groups(topology, device, config.timeouts.collective)
    corpus, trouble = None, None
    try:
        corpus = Corpus.open(settings.corpus)
    except RaypackError as error:
        trouble = str(error)
    agree(groups.host, bytes(32), "a corpus", trouble)
    assert corpus is not None
    parameters = build_parameters(config.model, config.train, config.run.seed, groups, device)
    optimizer = build_optimizer(parameters.masters, config.train)
    model_digest = digest_of(config.model.model_dump_json()).hex()
    identity = digest_of(code_version(), config.model_dump_json(), model_digest, corpus.fingerprint)
    trainer = Trainer(
        parameters, optimizer, config.train, config.run.steps, Wire(groups, Ledger(topology, rank)), groups, device,
        identity, settings.attempt,
    )  # fmt: skip
    if device.type == "cpu":
        peak, peak_source = (
            matmul_rate(groups.world, torch.float32),
            "matrix products measured at start, all ranks at once",
        )
    else:
        cluster = plan_cluster(config)
        peak, peak_source = cluster.peak_flops, f"cluster preset {cluster.name}"
    source = PlanSource(settings.planner, settings.attempt, topology, config.timeouts.plan)
    return Run(
        settings, config, topology, rank, corpus, trainer, source, corpus.fingerprint, model_digest, peak, peak_source
    )


def _topology(config: Config) -> Topology:
    """Of the machines, or of the run file where it overrides them."""
    context = ray.train.get_context()
    here = (ray.get_runtime_context().get_node_id(), context.get_local_rank())
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, here)
    found = topology_of(places)
    return Topology(config.topology.nodes) if config.topology.nodes else found


def _start(run: Run) -> tuple[int, StreamState]:
    """Step and stream state to begin at: the run's start, or the checkpoint's."""
    resume = run.settings.resume
    if not resume:
        return 0, training_stream(run.corpus, run.config.data).start
    state = load(run.trainer, Path(resume))
    trouble = None
    if state.model != run.model_digest:
        trouble = f"{resume} holds another model than [model] describes: use its config.toml, or --run.resume never"
    elif state.corpus != run.fingerprint:
        trouble = (
            f"{resume} was trained on another corpus (fingerprint {state.corpus[:12]}): give that one as data.corpus"
        )
    agree(run.trainer.groups and run.trainer.groups.host, bytes(32), "a checkpoint", trouble)
    return state.step, state.stream


def _loader(corpus: Corpus) -> Any:
    return partial(load_rows, corpus)


def _held_out(run: Run, work_of: Any) -> StepWork | None:
    if not run.config.train.eval_every:
        return None
    work, trouble = None, None
    try:
        plan = run.source.held_out()
        work = work_of(plan) if plan is not None else None
    except RaypackError as error:
        trouble = str(error)
    digest = work.plan.digest if work is not None else bytes(32)
    agree(run.trainer.groups and run.trainer.groups.host, digest, "the plan of the held-out samples", trouble)
    return work


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
    every = run.config.train.checkpoint_every
    if step != run.config.run.steps and not (every and step % every == 0):
        return
    started = time.perf_counter()
    state = RunState(step, stream, run.model_digest, run.fingerprint)
    save(run.trainer, Path(run.settings.run_dir), state, run.config.train.checkpoint_keep)
    result.phases["checkpoint"] = time.perf_counter() - started


def _report(run: Run, fed: Fed, result: StepResult, seconds: float, heldout_loss: float | None) -> RankReport:
    planned, work = fed.planned, fed.work
    assert planned is not None
    assert work is not None
    ledger = run.trainer.wire.ledger.take()
    phases = dict(result.phases, plan_wait=fed.wait_seconds, prepare=fed.prepare_seconds)
    waiting = sum(ledger.seconds.values()) + result.phases.get("agree", 0.0) + result.phases.get("gradient_reduce", 0.0)
    plan = work.plan
    facts = None
    if run.rank == 0:
        ids = np.array([p.sample for p in plan.placements], dtype=np.int64)
        assert plan.before is not None
        facts = StepFacts(
            epoch=plan.before.epoch,
            first_sample=plan.before.next_sample,
            sample_count=len(ids),
            tokens=plan.tokens,
            labels=plan.labels,
            rounds=len(plan.rounds),
            policy=plan.policy,
            loss=result.loss,
            grad_norm=result.grad_norm,
            model_flops=planned.model_flops,
            sample_ids_digest=hashlib.sha256(np.sort(ids).tobytes()).hexdigest()[:16],
            plan_seconds=planned.plan_seconds,
            plan_bound_ratio=planned.bound_ratio,
            peak_flops=run.peak_flops,
            peak_source=run.peak_source,
            bytes_static=planned.bytes_static,
            bytes_dynamic=planned.bytes_dynamic,
            parent_widths=planned.parent_widths,
            child_widths=planned.child_widths,
            learning_rate=result.lr,
            heldout_loss=heldout_loss,
            expert_load=result.expert_load or None,
            applied=result.applied,
        )
    return RankReport(
        rank=run.rank,
        node=run.topology.node_of[run.rank],
        world=run.topology.world,
        attempt=run.settings.attempt,
        step=plan.step,
        tokens=work.rank_tokens,
        seconds=seconds,
        busy_seconds=max(0.0, seconds - waiting - fed.wait_seconds),
        wait_seconds=waiting,
        plan_wait_seconds=fed.wait_seconds,
        exchanged=ledger.exchanged,
        collected=ledger.collected,
        phases=phases,
        memory_bytes=_memory(run.trainer.device),
        facts=facts,
    )


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
