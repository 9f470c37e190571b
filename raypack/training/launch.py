"""The driver of a run: check, start Ray's actors, let Ray Train run the workers, sum up.

It runs where the job's entrypoint runs and holds no tensor.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import tomli_w
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from rich.console import Console

from raypack.config import Config
from raypack.data.corpus import Corpus, check_vocabulary
from raypack.data.default import default_corpus, raypack_home
from raypack.data.splits import training_stream
from raypack.errors import RaypackError
from raypack.observe.console import RunView, summary_table
from raypack.observe.follow import Follower
from raypack.observe.observer import head_node_options, start_observer
from raypack.observe.steps import STEPS_FILE, next_attempt
from raypack.parallel.topology import Topology
from raypack.planning.planner import Planner, StepPlanner
from raypack.runfile import load_run
from raypack.training.checkpoint import newest
from raypack.training.preflight import check_places, check_resources, connect
from raypack.training.worker import WorkerSettings, train_worker


def main(argv: Sequence[str], default: Path, description: str) -> int:
    """Run a job script's arguments; the exit code. A fault is one line on standard error."""
    console = Console()
    try:
        return launch(load_run(argv, default, description), console)
    except RaypackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def launch(config: Config, console: Console) -> int:
    """Run `config` from start to end; returns 0, or 130 where Ctrl-C ended it.

    Raises:
        RaypackError: a check before the start failed, or the run did; records so far are kept.
    """
    corpus_path = _absolute(config.data.corpus) if config.data.corpus else default_corpus()
    corpus = Corpus.open(corpus_path)
    check_vocabulary(corpus, config.model.vocabulary)
    run_dir, resume = _run_directory(config)
    notes = _check_plan(config, corpus)
    with connect(config):
        check_resources(config)
        check_places(run_dir, corpus_path, config.timeouts.actor)
        _write_config(run_dir, config, corpus_path)
        attempt = next_attempt(run_dir)
        actor, url = start_observer(
            str(run_dir), run_dir.name, config.observe.bind, config.observe.port, notes, config.timeouts.actor
        )
        planner = Planner.options(**head_node_options()).remote(config.model_dump(), str(corpus_path))
        _wait(planner.ready.remote(), config.timeouts.actor, "the planner actor to start")
        _wait(actor.begin.remote(attempt, config.topology.workers), config.timeouts.actor, "the observer actor")
        console.print(f"run {run_dir}, metrics {url}", soft_wrap=True)
        settings = WorkerSettings(config, str(corpus_path), str(run_dir), planner, actor, attempt, resume)
        reason, failure = "finished", None
        try:
            with Follower(actor, RunView(console, config.run.steps, table=config.observe.table)):
                _trainer(config, settings, run_dir).fit()
        except KeyboardInterrupt:
            reason = "interrupted"
        except ray.train.TrainingFailedError as error:
            reason, failure = "failed", _one_line(error)
        summary = _wait(actor.finish.remote(reason), config.timeouts.actor, "the observer's summary")
        console.print(summary_table(summary))
    if failure is not None:
        raise RaypackError(f"the run failed: {failure} (records: {run_dir})")
    return 130 if reason == "interrupted" else 0


def _trainer(config: Config, settings: WorkerSettings, run_dir: Path) -> TorchTrainer:
    gpus = config.topology.gpus_per_worker
    resources = {"CPU": config.topology.cpus_per_worker, **({"GPU": gpus} if gpus else {})}
    return TorchTrainer(
        train_worker,
        train_loop_config={"settings": settings},
        scaling_config=ScalingConfig(
            num_workers=config.topology.workers, use_gpu=gpus > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=run_dir.name,
            storage_path=str(run_dir.parent / ".ray_train"),
            failure_config=FailureConfig(max_failures=0),
        ),
        torch_config=TorchConfig(timeout_s=int(config.timeouts.collective)),
    )


def _absolute(path: str) -> Path:
    """Relative to the current directory, but in a Ray job to RAYPACK_HOME: there the current one is a throw-away copy."""
    given = Path(path).expanduser()
    base = (
        raypack_home() if os.environ.get("RAY_JOB_ID") or os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") else Path.cwd()
    )
    return given if given.is_absolute() else (base / given).absolute()


def _run_directory(config: Config) -> tuple[Path, str]:
    """The run's directory and the checkpoint to go on from ("" = none)."""
    name = config.run.name or f"{config.model.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if "/" in name or name.startswith("."):
        raise RaypackError(f"run.name = {name!r}: must be a plain directory name")
    run_dir = _absolute(config.run.root) / name
    used = (run_dir / STEPS_FILE).exists()
    if config.run.resume == "never":
        if used:
            raise RaypackError(f"{run_dir} holds a run already: give another --run.name, or --run.resume auto")
        return run_dir, ""
    if config.run.resume == "auto":
        found = newest(run_dir)
        if found is None and used:
            raise RaypackError(f"{run_dir} has records but no complete checkpoint: give another --run.name")
        return run_dir, str(found) if found else ""
    folder = _absolute(config.run.resume)
    if not folder.is_dir():
        raise RaypackError(f"run.resume = {config.run.resume}: no such checkpoint directory; use auto, never or a path")
    return run_dir, str(folder)


def _check_plan(config: Config, corpus: Corpus) -> list[str]:
    """Prove before Ray starts that a sample of `max_sample_tokens` can be planned; lines for the summary."""
    counts = training_stream(corpus, config.data).counts
    nodes = config.topology.nodes
    planner = StepPlanner(config, corpus)
    per_node = planner.cluster.ranks_per_node
    topology = Topology(nodes) if nodes else Topology.regular(config.topology.workers, per_node)
    planner.check_longest(topology)
    notes = [
        f"{counts.samples} samples an epoch; {counts.truncated} truncated to {config.data.max_sample_tokens} tokens, "
        f"{counts.skipped_long} longer and {counts.skipped_short} of one token skipped"
    ]
    if nodes:
        notes.append(f"nodes are simulated: topology.nodes = {list(nodes)} in place of the machines")
    return notes


def _write_config(run_dir: Path, config: Config, corpus: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        data = config.model_dump()
        data["data"]["corpus"] = str(corpus)
        (run_dir / "config.toml").write_text(tomli_w.dumps(data), encoding="utf-8")
        if shutil.disk_usage(run_dir).free < 100 * 2**20:
            raise RaypackError(f"less than 100 MB are free at {run_dir}: choose another run.root")
    except OSError as error:
        raise RaypackError(f"cannot write to {run_dir}: {error.strerror}; choose another run.root") from None


def _wait(asked: Any, timeout: float, what: str) -> Any:
    try:
        return ray.get(asked, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise RaypackError(f"waited timeouts.actor = {timeout:g} s for {what}; is the head node alive?") from None
    except ray.exceptions.RayTaskError as error:
        raise RaypackError(f"{what}: {error.cause}") from None
    except ray.exceptions.RayError as error:
        raise RaypackError(f"{what}: {str(error).splitlines()[0]}") from None


def _one_line(error: Exception) -> str:
    """The reason that the workers agreed on, else the last line of the first worker's error."""
    failures = getattr(error, "worker_failures", None) or {}
    for rank in sorted(failures):
        cause: BaseException | None = failures[rank]
        while cause is not None:
            if isinstance(cause, RaypackError):
                return str(cause)
            cause = getattr(cause, "cause", None) or cause.__cause__
    for rank, failure in sorted(failures.items()):
        lines = [line for line in str(failure).splitlines() if line.strip()]
        return f"rank {rank}: {lines[-1] if lines else type(failure).__name__}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
