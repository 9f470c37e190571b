"""The driver of a run: check, start Ray's actors, let Ray Train run the workers, sum up.

It runs where the job's entrypoint runs and holds no tensor.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from rich.console import Console

from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.data.default import default_corpus
from raypack.data.stream import StreamCounts
from raypack.errors import RaypackError
from raypack.observe.attempts import last_reason
from raypack.observe.console import RunView, summary_table
from raypack.observe.death import cause_of_death
from raypack.observe.follow import Follower
from raypack.observe.observer import head_node_options, start_observer
from raypack.observe.steps import next_attempt
from raypack.planning.planner import Planner
from raypack.training.cluster import address_of, connected
from raypack.training.elastic import RunTrainer, WorkerGroups
from raypack.training.ending import reason_of
from raypack.training.loop import Job
from raypack.training.preflight import (
    check_checkpoint,
    check_corpus_named,
    check_machine,
    check_places,
    check_plan,
    check_resources,
)
from raypack.training.preflight_storage import check_storage
from raypack.training.rundir import FAILURE_FILE, absolute, held, resolve_run, resume_notes, write_config
from raypack.training.start_watch import StartWatch
from raypack.training.worker import WorkerSettings, train_worker

# Settings of the job script that a worker on another machine would not see.
PASSED_ON = ("PYTORCH_CUDA_ALLOC_CONF",)


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


def launch(config: Config, console: Console | None = None) -> None:
    """Run `config` from start to end.

    Raises:
        RaypackError: a check before the start failed, or the run did; records so far are kept.
        KeyboardInterrupt: Ctrl-C or SIGTERM; workers and actors are gone, records and summary are kept.
    """
    console = console or Console()
    run = prepare_run(config)
    with held(run.run_dir):
        write_config(run.run_dir, config, run.corpus)
        with connected(config):
            check_resources(config.topology)
            check_places(run.run_dir, run.corpus, config.timeouts.actor)
            check_storage(config, run.run_dir, config.timeouts.actor)
            _train(run, console)


def prepare_run(config: Config) -> Prepared:
    """Every check that needs no Ray; writes nothing but, on first use, the default corpus."""
    check_corpus_named(config)
    if not address_of(config):
        check_machine(config)
    run_dir, resume = resolve_run(config)
    path = absolute(config.data.corpus) if config.data.corpus else default_corpus()
    corpus = Corpus.open(path)
    counts = check_plan(config, corpus)
    if resume is not None:
        check_checkpoint(resume, config, corpus)
    return Prepared(config, path, run_dir, resume, counts)


def _train(run: Prepared, console: Console) -> None:
    """The attempts between the observer's start and its summary, whatever ends them."""
    config = run.config
    seen = config.observe
    observer, url = start_observer(
        str(run.run_dir), run.run_dir.name, seen.bind, seen.port, run.notes, config.timeouts.actor,
        corpus=run.fates, tensorboard=seen.tensorboard,
    )  # fmt: skip
    console.print(f"run {run.run_dir}, metrics {url}", soft_wrap=True, highlight=False)
    try:
        _run_attempts(run, observer, console)
    except (RaypackError, KeyboardInterrupt) as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error}"
        with suppress(RaypackError):
            _sum_up(observer, reason, config, console)
        raise
    _sum_up(observer, "finished", config, console)


def _run_attempts(run: Prepared, observer: Any, console: Console) -> None:
    """Ray Train's controller runs one attempt after another, until the run is done or must be given up."""
    config, limit = run.config, run.config.timeouts.actor
    attempt = next_attempt(run.run_dir)
    (run.run_dir / FAILURE_FILE).unlink(missing_ok=True)  # of an earlier start
    planner = Planner.options(**head_node_options()).remote(config.model_dump(), str(run.corpus))
    _wait(planner.ready.remote(), limit, "the planner actor to start")
    _wait(observer.begin.remote(attempt, config.topology.workers), limit, "the observer actor")
    job = Job(config, str(run.corpus), str(run.run_dir), run.resume or "", attempt)
    trainer = _trainer(WorkerSettings(job, planner, observer))
    view = RunView(console, config.run.steps, table=config.observe.table)
    watch = StartWatch(planner, attempt, config.topology.workers, config.timeouts.start)
    with watch, Follower(observer, view, run.run_dir):
        failure = _fit(trainer)
    if failure is not None:
        with suppress(OSError):  # a full disk may be why it failed
            (run.run_dir / FAILURE_FILE).write_text(f"{failure}\n", encoding="utf-8")
        reason = last_reason(run.run_dir) if isinstance(failure, ray.train.WorkerGroupError) else ""
        raise RaypackError(f"{reason or reason_of(failure)} (records and traceback: {run.run_dir})") from failure


def _sum_up(observer: Any, reason: str, config: Config, console: Console) -> None:
    summary = _wait(observer.finish.remote(reason), config.timeouts.actor, "the observer's summary")
    console.print(summary_table(summary))


def _trainer(settings: WorkerSettings) -> RunTrainer:
    config, run_dir = settings.job.config, Path(settings.job.run_dir)
    topology = config.topology
    gpus = topology.gpus_per_worker
    resources = {"CPU": topology.cpus_per_worker, **({"GPU": gpus} if gpus else {})}
    groups = WorkerGroups(config, str(run_dir), settings.observer, settings.job.first_attempt)
    return RunTrainer(
        train_worker,
        train_loop_config={"settings": settings},
        scaling_config=ScalingConfig(
            num_workers=(topology.least, topology.workers) if topology.elastic else topology.workers,
            elastic_resize_monitor_interval_s=topology.resize_seconds,
            use_gpu=gpus > 0,
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            name=run_dir.name,
            storage_path=str(run_dir / ".ray_train"),
            worker_runtime_env={"env_vars": {name: os.environ[name] for name in PASSED_ON if name in os.environ}},
            failure_config=FailureConfig(max_failures=-1),  # `RunFailures` decides
            callbacks=[groups],
        ),
        torch_config=TorchConfig(timeout_s=int(config.timeouts.collective)),
        run=config,
        run_dir=str(run_dir),
    )


def _fit(trainer: RunTrainer) -> Exception | None:
    """Train; the error that ended it, if one did."""
    try:
        trainer.fit()
    except SystemExit:  # how a handler of Ray's own ends a run
        raise KeyboardInterrupt from None
    except ray.train.TrainingFailedError as error:
        return error
    except ray.exceptions.RayError as error:
        return error
    return None


def _wait(asked: Any, timeout: float, what: str) -> Any:
    try:
        return ray.get(asked, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise RaypackError(f"waited timeouts.actor = {timeout:g} s for {what}; is the head node alive?") from None
    except ray.exceptions.RayTaskError as error:
        raise RaypackError(f"{what}: {error.cause}") from None
    except ray.exceptions.RayError as error:
        raise RaypackError(f"{what}: {cause_of_death(str(error))}") from None
