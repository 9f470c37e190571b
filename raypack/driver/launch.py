"""The driver of a run: check, start Ray's actors, let Ray Train run the workers, sum up.

It runs where the job's entrypoint runs and holds no tensor.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from rich.console import Console

from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.data.default import default_corpus, default_corpus_path
from raypack.data.stream import StreamCounts
from raypack.driver.elastic import RunTrainer, WorkerGroups
from raypack.driver.ending import reason_of
from raypack.driver.last_lines import FINISHED, last_lines, short
from raypack.driver.planner import Planner
from raypack.driver.preflight import (
    check_checkpoint,
    check_corpus_named,
    check_machine,
    check_places,
    check_plan,
    check_resources,
)
from raypack.driver.preflight_storage import check_storage
from raypack.driver.ray_cluster import address_of, connected
from raypack.driver.rundir import held, resolve_run, resume_notes, write_config
from raypack.driver.start_watch import StartWatch, living_workers
from raypack.driver.worker import WorkerSettings, train_worker
from raypack.errors import RaypackError
from raypack.files import absolute
from raypack.observe.attempts import last_reason
from raypack.observe.observer import cause_of_death, head_node_options, start_observer
from raypack.observe.run_files import FAILURE_FILE
from raypack.observe.steps import next_attempt
from raypack.observe.summary import Summary
from raypack.report.follow import Follower
from raypack.report.view import RunView
from raypack.training.loop import Job

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


def launch(config: Config, view: RunView, typed: Sequence[str] = ()) -> None:
    """Run `config` from start to end, and say so on `view`; `typed` = how the job was called (`last_lines`).

    Raises:
        RaypackError: a check before the start failed, or the run did; records so far are kept.
        KeyboardInterrupt: Ctrl-C or SIGTERM; workers and actors are gone, records and summary are kept.
    """
    run = prepare_run(config, view)
    with held(run.run_dir):
        write_config(run.run_dir, config, run.corpus)
        with ExitStack() as ray_there:
            with view.phase("Ray") as said:
                dashboard = ray_there.enter_context(connected(config))
                said.append(_ray_in_words(config, dashboard))
            with view.phase("cluster checks") as said:
                check_resources(config.topology)
                check_places(run.run_dir, run.corpus, config.timeouts.actor)
                check_storage(config, run.run_dir, config.timeouts.actor)
                said.append("there is room for the workers, and storage for checkpoints")
            summary, ended = _train(run, view)
            view.doing("Ray stops", 0.0)
        page = ""
        if ended is None:
            view.doing("the page of the run is written", 0.0)
            page = _write_page(run.run_dir)
        view.close()
        for line in last_lines(config, run.run_dir, summary, page, typed):
            view.say(line.text, line.indent)
        if ended is not None:
            raise ended


def prepare_run(config: Config, view: RunView | None = None) -> Prepared:
    """Every check that needs no Ray; writes nothing but, on first use, the default corpus."""
    bar = view is None  # else the view has a spinner
    view = view or RunView(Console(quiet=True), config.run.steps)
    check_corpus_named(config)
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


def _train(run: Prepared, view: RunView) -> tuple[Summary | None, RaypackError | KeyboardInterrupt | None]:
    """The attempts between the observer's start and its summary; what ended them, None = the last step."""
    config = run.config
    seen = config.observe
    # Two processes that start at once.
    planner = Planner.options(**head_node_options()).remote(config.model_dump(), str(run.corpus))
    with view.phase("observer") as said:
        observer, url = start_observer(
            str(run.run_dir), run.run_dir.name, seen.bind, seen.port, run.notes, config.timeouts.actor,
            corpus=run.fates, tensorboard=seen.tensorboard,
        )  # fmt: skip
        said.append(f"run {run.run_dir}, metrics {url}")
    ended: RaypackError | KeyboardInterrupt | None = None
    try:
        _run_attempts(run, planner, observer, view)
    except (RaypackError, KeyboardInterrupt) as error:
        ended = error
    view.doing("the run is summed up", 0.0)
    try:
        asked = observer.finish.remote(_reason(ended))
        return _wait(asked, config.timeouts.actor, "the observer's summary"), ended
    except RaypackError as error:
        return None, ended or error


def _reason(ended: RaypackError | KeyboardInterrupt | None) -> str:
    if ended is None:
        return FINISHED
    return "interrupted" if isinstance(ended, KeyboardInterrupt) else f"failed: {ended}"


def _run_attempts(run: Prepared, planner: Any, observer: Any, view: RunView) -> None:
    """Ray Train's controller runs one attempt after another, until the run is done or must be given up."""
    config, limit = run.config, run.config.timeouts.actor
    topology = config.topology
    attempt = next_attempt(run.run_dir)
    (run.run_dir / FAILURE_FILE).unlink(missing_ok=True)  # of an earlier start
    with view.phase("planner") as said:
        _wait(planner.ready.remote(), limit, "the planner actor to start")
        _wait(observer.begin.remote(attempt, topology.workers), limit, "the observer actor")
        said.append(f"{config.plan.policy}, by the cost model of cluster {config.plan.cluster}")
    job = Job(config, str(run.corpus), str(run.run_dir), run.resume or "", attempt)
    trainer = _trainer(WorkerSettings(job, planner, observer))
    watch = StartWatch(planner, attempt, topology.workers, config.timeouts.start)
    follower = Follower(observer, view, run.run_dir, attempt=attempt, workers=topology.workers, alive=living_workers)
    with watch, follower:
        failure = _fit(trainer)
    if failure is not None:
        with suppress(OSError):  # a full disk may be why it failed
            (run.run_dir / FAILURE_FILE).write_text(f"{failure}\n", encoding="utf-8")
        reason = last_reason(run.run_dir) if isinstance(failure, ray.train.WorkerGroupError) else ""
        raise RaypackError(f"{reason or reason_of(failure)} (records and traceback: {run.run_dir})") from failure


def _ray_in_words(config: Config, dashboard: str) -> str:
    address = address_of(config)
    where = f"the cluster at {address}" if address else "started on this machine, without its dashboard"
    return f"{ray.__version__}, {where}" + (f", dashboard http://{dashboard}" if dashboard else "")


def _write_page(run_dir: Path) -> str:
    """Where the page is, else why there is none: a run that is done does not fail by it."""
    try:
        from raypack.report.page import write_page  # with it comes matplotlib

        return short(write_page(run_dir))
    except (OSError, RaypackError) as error:
        return f"could not be written: {error}"
    except KeyboardInterrupt:
        return "left out, as it was interrupted"


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
