"""The driver of a run: check, start Ray's actors, let Ray Train run the workers, sum up.

It runs where the job's entrypoint runs and holds no tensor.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.train.torch import TorchConfig

from raypack.config import Config
from raypack.driver.elastic import NodesInReach, WorkerGroups
from raypack.driver.failures import RunFailures, reason_of
from raypack.driver.last_lines import FINISHED, last_lines, short
from raypack.driver.nodes import check_names_everywhere, check_places, check_resources, check_storage
from raypack.driver.planner import Planner
from raypack.driver.preflight import Prepared, prepare_run
from raypack.driver.ray_cluster import address_of, connected
from raypack.driver.ray_internals import (
    FailureConfig,
    PolicyTrainer,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
    living_workers,
)
from raypack.driver.rundir import held, write_config
from raypack.driver.worker import WorkerSettings, train_worker
from raypack.errors import RaypackError
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
# How often, in seconds, it is looked whether a worker has begun.
ASK_SECONDS = 1.0


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
                check_names_everywhere(config, config.timeouts.actor)
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


def _train(run: Prepared, view: RunView) -> tuple[Summary | None, RaypackError | KeyboardInterrupt | None]:
    """The attempts between the observer's start and its summary; what ended them, None = the last step."""
    config = run.config
    seen = config.observe
    # Two processes that start at once.
    planner = Planner.options(**head_node_options()).remote(config.model_dump(), str(run.corpus))
    with view.phase("observer") as said:
        observer, url = start_observer(
            str(run.run_dir), run.run_dir.name, seen.bind, seen.port, run.notes, config.timeouts.actor,
            corpus=run.fates, sinks=seen.all_sinks,
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
        reason = last_reason(run.run_dir) if isinstance(failure, WorkerGroupError) else ""
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


def _trainer(settings: WorkerSettings) -> PolicyTrainer:
    config, run_dir = settings.job.config, Path(settings.job.run_dir)
    topology = config.topology
    gpus = topology.gpus_per_worker
    # Declared for callbacks of users; Ray takes its controller's own kind here too.
    callbacks: list[Any] = [WorkerGroups(config, str(run_dir), settings.observer, settings.job.first_attempt)]
    scaling = ScalingConfig(
        num_workers=(topology.least, topology.workers) if topology.elastic else topology.workers,
        elastic_resize_monitor_interval_s=topology.resize_seconds,
        use_gpu=gpus > 0,
        resources_per_worker={"CPU": topology.cpus_per_worker, **({"GPU": gpus} if gpus else {})},
    )
    endless = FailureConfig(max_failures=-1)  # `RunFailures` decides
    return PolicyTrainer(
        train_worker,
        train_loop_config={"settings": settings},
        scaling_config=scaling,
        run_config=RunConfig(
            name=run_dir.name,
            storage_path=str(run_dir / ".ray_train"),
            worker_runtime_env={"env_vars": {name: os.environ[name] for name in PASSED_ON if name in os.environ}},
            failure_config=endless,
            callbacks=callbacks,
        ),
        torch_config=TorchConfig(timeout_s=int(config.timeouts.collective)),
        failures=RunFailures(endless, config, str(run_dir)),
        sizes=NodesInReach(scaling, config.timeouts.nodes) if topology.elastic else None,
    )


def _fit(trainer: PolicyTrainer) -> Exception | None:
    """Train; the error that ended it, if one did."""
    try:
        trainer.fit()
    except SystemExit:  # how a handler of Ray's own ends a run
        raise KeyboardInterrupt from None
    except TrainingFailedError as error:
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


class StartWatch:
    """Context manager around the run, in the main thread: interrupts it where no worker has asked for a plan in time.

    Raises:
        RaypackError: on leaving, where the time was up.
    """

    def __init__(self, planner: Any, attempt: int, workers: int, timeout: float) -> None:
        """`planner` = the actor; `timeout` in seconds."""
        self._planner, self._attempt, self._workers, self._timeout = planner, attempt, workers, timeout
        self._over, self._late = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="raypack-start", daemon=True)

    def __enter__(self) -> StartWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=2 * ASK_SECONDS)
        if self._late:
            raise RaypackError(
                f"waited timeouts.start = {self._timeout:g} s for {self._workers} workers to start: are the cluster's "
                "CPUs or GPUs in use by others, or is it slow? Free them, or raise timeouts.start"
            ) from None

    def _watch(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._over.wait(ASK_SECONDS):
            with suppress(ray.exceptions.RayError):
                if ray.get(self._planner.begun.remote(self._attempt), timeout=ASK_SECONDS):
                    return
            if time.monotonic() > deadline:
                self._late = True
                os.kill(os.getpid(), signal.SIGINT)
                return
