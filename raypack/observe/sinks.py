"""Where step records go: several dumb sinks of one typed record. A sink that fails never stops the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from raypack.errors import RaypackError
from raypack.observe.record import StepRecord, by_scope

TENSORBOARD_FOLDER = "tensorboard"


class Sink(Protocol):
    """Takes in every record once, in the order in which steps settle."""

    def update(self, record: StepRecord, replayed: bool) -> None:
        """`replayed` says that an earlier attempt had done the step."""

    def close(self) -> None:
        """No record follows."""


class TensorBoard:
    """TensorBoard events in `tensorboard/` of the run directory. A replayed step is written again: the last wins."""

    def __init__(self, run_dir: Path) -> None:
        """Raises RaypackError where the writer is not installed, or the directory cannot be written."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise RaypackError(
                "observe.tensorboard = true: needs the package tensorboardX; install it or leave the setting out"
            ) from None
        try:
            self._writer: Any = SummaryWriter(str(run_dir / TENSORBOARD_FOLDER), write_to_disk=True, flush_secs=10)
        except OSError as error:
            raise RaypackError(f"cannot write {run_dir / TENSORBOARD_FOLDER}: {error.strerror or error}") from None

    def update(self, record: StepRecord, replayed: bool) -> None:
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record.step, walltime=record.time)

    def close(self) -> None:
        self._writer.close()


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
