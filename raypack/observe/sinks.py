"""Where step records go besides the run's own files: TensorBoard, Weights & Biases, MLflow, or a class of one's own.

`observe.sinks` names them. Each runs on a thread of the observer, so a slow one delays nobody, and a fault of one
becomes a line on standard error: no sink stops a run, or another sink.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from raypack.errors import RaypackError
from raypack.observe.record import StepRecord, by_scope
from raypack.observe.run_files import CONFIG_FILE
from raypack.registry import blame, resolve

TENSORBOARD_FOLDER = "tensorboard"
PROJECT = "raypack"
"""Of Weights & Biases, and experiment of MLflow, where their own environment variables name none."""
RECORDS_WAITING = 1024
CLOSE_SECONDS = 20.0


class Sink(Protocol):
    """Takes in every record once, in the order in which steps settle.

    A class of one's own has this interface. It is made with the run's directory and name when the run starts, and again
    when a run goes on (or the observer had to start again): `config.toml` is there then, and records are not repeated.
    """

    def __init__(self, run_dir: Path, run_name: str) -> None:
        """Raises RaypackError, with what to change, where it cannot begin: the run is then not started."""

    def update(self, record: StepRecord, replayed: bool) -> None:
        """`replayed` says that an earlier attempt had done the step. `scalars(record)` has the figures."""

    def close(self) -> None:
        """No record follows."""


class TensorBoard:
    """TensorBoard events in `tensorboard/` of the run directory. A replayed step is written again: the last wins."""

    def __init__(self, run_dir: Path, run_name: str) -> None:
        writers = _package("tensorboardX", "tensorboard", "tensorboardX")
        self._writer: Any = writers.SummaryWriter(str(run_dir / TENSORBOARD_FOLDER), write_to_disk=True, flush_secs=10)

    def update(self, record: StepRecord, replayed: bool) -> None:
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record.step, walltime=record.time)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, of the run's name; it goes on when the run does.

    Account, project and mode (`WANDB_MODE=offline` writes to `wandb/` of the run directory) come from the environment
    of the head node.
    """

    def __init__(self, run_dir: Path, run_name: str) -> None:
        wandb = _package("wandb", "wandb", "raypack[wandb]")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_name,
            name=run_name,
            dir=str(run_dir),
            config=run_settings(run_dir),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        # W&B's own counter only rises, and a replayed step comes again.
        self._run.define_metric("*", step_metric="step")

    def update(self, record: StepRecord, replayed: bool) -> None:
        self._run.log({"step": record.step, **scalars(record)})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, of the run's name; it goes on when the run does. A replayed step is written again.

    `MLFLOW_TRACKING_URI` of the head node's environment says where; without it files in `mlruns/` of the run directory.
    """

    def __init__(self, run_dir: Path, run_name: str) -> None:
        mlflow = _package("mlflow", "mlflow", "raypack[mlflow]")
        store = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not store:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # it asks for a database otherwise, and for more packages
            store = (run_dir / "mlruns").as_uri()
        self._metric = mlflow.entities.Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=store)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([where], f"tags.`raypack.run_dir` = '{run_dir}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(where, run_name=run_name, tags={"raypack.run_dir": str(run_dir)}).info.run_id
        for key, value in run_settings(run_dir).items():
            self._client.log_param(self._id, key, value)

    def update(self, record: StepRecord, replayed: bool) -> None:
        at = int(1000 * record.time)
        metrics = [self._metric(tag, value, at, record.step) for tag, value in scalars(record).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


_SHIPPED: Mapping[str, Callable[[Path, str], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def find_sink(name: str) -> Callable[[Path, str], Sink]:
    """The class of a name of `plan.names.SINKS`, or of `package.module:object`.

    Raises:
        RaypackError: there is no such class.
    """
    found: Callable[[Path, str], Sink] = resolve(
        name, _SHIPPED, "observe.sinks", _fits, "a class with update and close"
    )
    return found


def _fits(found: Any) -> bool:
    return callable(found) and callable(getattr(found, "update", None)) and callable(getattr(found, "close", None))


class Aside:
    """A sink on a thread of its own: `update` returns at once, and nothing that the sink does is raised."""

    def __init__(self, name: str, run_dir: Path, run_name: str) -> None:
        """Raises RaypackError where the sink cannot begin."""
        self._name = name
        try:
            self._sink = find_sink(name)(run_dir, run_name)
        except RaypackError:
            raise
        except Exception as error:
            raise blame(name, "observe.sinks", error) from error
        self._waiting: queue.Queue[tuple[StepRecord, bool] | None] = queue.Queue(RECORDS_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def update(self, record: StepRecord, replayed: bool) -> None:
        try:
            self._waiting.put_nowait((record, replayed))
        except queue.Full:
            self._complain(f"is {RECORDS_WAITING} records behind: step {record.step} is left out")

    def end(self) -> None:
        """No record follows; returns at once."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)

    def wait(self, until: float) -> None:
        """For what is not written yet, until this `time.monotonic()`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._complain(f"was not done {CLOSE_SECONDS:g} s after the last step, and is left")

    def _work(self) -> None:
        while (given := self._waiting.get()) is not None:
            self._try(self._sink.update, *given)
        self._try(self._sink.close)

    def _try(self, what: Callable[..., None], *given: Any) -> None:
        try:
            what(*given)
        except Exception as error:
            self._complain(str(blame(self._name, "observe.sinks", error)))

    def _complain(self, text: str) -> None:
        print(f"observer: sink {self._name}: {text}", file=sys.stderr, flush=True)


def close_all(sinks: Sequence[Aside]) -> None:
    """Wait for all of them together at most `CLOSE_SECONDS`."""
    until = time.monotonic() + CLOSE_SECONDS
    for sink in sinks:
        sink.end()
    for sink in sinks:
        sink.wait(until)


def _package(module: str, sink: str, install: str) -> Any:
    try:
        return __import__(module)
    except ImportError as error:
        raise RaypackError(
            f'observe.sinks has "{sink}", and the package {error.name or module} is not installed: pip install '
            f"{install}, or leave the sink out"
        ) from None


def run_settings(run_dir: Path) -> dict[str, Any]:
    """The run's settings as `{"section.key": value}`; {} where there is no `config.toml`."""
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        return {}
    sections = tomllib.loads(file.read_text(encoding="utf-8"))
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def scalars(record: StepRecord) -> dict[str, float]:
    """The figures of a record as `{group/name: value}`; what is unknown is left out."""
    sent, static = by_scope(record.comparable_bytes), by_scope(record.bytes_static)
    found: dict[str, float | None] = {
        "learning/loss": record.loss if record.applied else None,
        "learning/heldout_loss": record.heldout_loss,
        "learning/grad_norm": record.grad_norm,
        "learning/learning_rate": record.learning_rate,
        "speed/step_seconds": record.seconds,
        "speed/tokens_per_second": record.tokens_per_second,
        "speed/mfu": record.mfu,
        "bytes/intra": sent["intra"],
        "bytes/inter": sent["inter"],
        "bytes/inter_static_plan": static["inter"] if record.bytes_static else None,
        "plan/wait_seconds": record.plan_wait_seconds,
        "plan/seconds": record.plan_seconds,
        "plan/bound_ratio": record.plan_bound_ratio,
        "plan/step_seconds_modelled": record.plan_step_seconds,
        "plan/step_seconds_static_modelled": record.static_step_seconds,
        "plan/step_seconds_dynamic_modelled": record.dynamic_step_seconds,
        "after_step/checkpoint_seconds": record.checkpoint_seconds,
        "after_step/evaluate_seconds": record.evaluate_seconds,
        "balance/busy_seconds": record.imbalance("busy_seconds"),
        "balance/tokens": record.imbalance("tokens"),
        "balance/experts": record.expert_load,
        "world/ranks": record.world,
        **{f"phases/{name}": seconds for name, seconds in record.phase_seconds.items()},
    }
    return {tag: float(value) for tag, value in found.items() if value is not None}
