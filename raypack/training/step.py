"""One training step, top to bottom: agree, run the rounds, sum the gradients, decide together, apply."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.profiler import record_function

from raypack.comm.agreement import agree, digest_of
from raypack.comm.wire import Groups, Wire
from raypack.config import TrainSection
from raypack.errors import Leaving
from raypack.model.decoder import RoutingSlot, expert_counts
from raypack.model.stopwatch import Stopwatch
from raypack.training.parameters import Parameters, Sharded, clip, learning_rate, set_learning_rate
from raypack.training.progress import Progress
from raypack.training.work import RoundWork, StepWork


@dataclass
class Trainer:
    """What one rank trains with. `identity` digests all that must be equal on all ranks besides the plan."""

    parameters: Parameters
    optimizer: torch.optim.Optimizer
    train: TrainSection
    steps: int
    wire: Wire
    groups: Groups | None
    device: torch.device
    identity: bytes = b""
    attempt: int = 0
    watch: Stopwatch | None = None
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class StepResult:
    """`loss` is the mean over the step's labels; the same on every rank, as are `grad_norm` and `applied`.

    `applied` is False for a skipped step: no label at all, or a loss or gradient that is not finite. `phases` =
    seconds; those inside exchanges are under `exchange` and in no other.
    """

    loss: float
    grad_norm: float
    applied: bool
    lr: float
    expert_load: float
    phases: dict[str, float] = field(default_factory=dict)
    layers: dict[tuple[str, str], float] = field(default_factory=dict)


def train_step(
    trainer: Trainer, work: StepWork | None, trouble: str | None = None, *, leave: bool = False
) -> StepResult:
    """Run one step on every rank.

    Args:
        trainer: this rank's model, optimizer and groups.
        work: from `prepare`; None if this rank could not prepare it, then
        trouble: says why, and every rank raises that text.
        leave: this rank was asked to leave before the step.

    Raises:
        RaypackError: on all ranks alike, where ranks disagree, one is in trouble, or their labels are not the plan's.
        Leaving: on all ranks alike, where any was asked to leave; nothing of the step was done.
    """
    phases: dict[str, float] = {}
    with _phase(trainer, phases, "agree"):
        _agree(trainer, work, trouble, leave)
    assert work is not None
    divisor = work.plan.labels
    lr = learning_rate(work.plan.step, trainer.steps, trainer.train)
    if divisor == 0:
        return StepResult(0.0, 0.0, False, lr, 0.0, phases)

    loss = torch.zeros((), dtype=torch.float64, device=trainer.device)
    slots: list[list[RoutingSlot]] = []
    for each in work.rounds:
        slots.append(trainer.parameters.model.slots())
        with _phase(trainer, phases, "forward"):
            local = _forward(trainer, each, slots[-1])
        with _phase(trainer, phases, "backward"):
            (local / divisor).backward()
            if trainer.watch:
                trainer.watch.mark("backward", "embed")
            trainer.parameters.collect()
        loss += local.detach()

    with _phase(trainer, phases, "gradient_reduce"):
        trainer.parameters.reduce(trainer.wire.ledger)
        totals = _totals(trainer, loss, slots)
        norm = trainer.parameters.norm()
    mean, counts = float(totals[0]) / divisor, totals[1:]
    # Both numbers are the same on every rank by now, so every rank decides alike.
    applied = bool(torch.isfinite(norm)) and math.isfinite(mean)
    with _phase(trainer, phases, "optimizer"):
        if applied:
            clip(trainer.parameters, norm, trainer.train.clip_norm)
            set_learning_rate(trainer.optimizer, lr)
            trainer.optimizer.step()
            trainer.parameters.publish()
            _balance(trainer, counts)
        trainer.optimizer.zero_grad(set_to_none=True)
    layers = trainer.watch.take() if trainer.watch else {}
    return StepResult(mean, float(norm), applied, lr, _load(trainer, counts), phases, layers)


@torch.no_grad()
def evaluate_loss(trainer: Trainer, work: StepWork) -> float:
    """Mean loss over the labels of `work`, forward only; the same on every rank."""
    loss = torch.zeros((), dtype=torch.float64, device=trainer.device)
    for each in work.rounds:
        loss += _forward(trainer, each, trainer.parameters.model.slots(), backward=False)
    if isinstance(trainer.parameters, Sharded):
        trainer.parameters.release()
    total = _totals(trainer, loss, [])
    return float(total[0]) / max(1, work.plan.labels)


def _agree(trainer: Trainer, work: StepWork | None, trouble: str | None, leave: bool) -> None:
    group = trainer.groups.host if trainer.groups is not None else None
    if work is None:
        agree(group, bytes(32), "nothing", trouble or "no work for this step")
        return
    plan = work.plan
    described = f"step {plan.step}, attempt {trainer.attempt}, plan {plan.digest.hex()[:12]} of {plan.policy}"
    digest = digest_of(plan.digest, plan.step, trainer.attempt, list(plan.nodes), trainer.identity)
    if agree(group, digest, described, trouble, notice=leave, labels=(work.labels, plan.labels)):
        raise Leaving(f"before step {plan.step}")


def _forward(trainer: Trainer, work: RoundWork, slots: list[RoutingSlot], *, backward: bool = True) -> torch.Tensor:
    if isinstance(trainer.parameters, Sharded):
        trainer.parameters.count_round(trainer.wire.ledger, backward=backward)
    tokens = work.tokens.to(trainer.device, non_blocking=True)
    labels = work.labels.to(trainer.device, non_blocking=True)
    watch = trainer.watch if backward else None
    if watch:
        watch.start()
    return trainer.parameters.model(tokens, labels, work.frame, trainer.wire, slots, watch)


def _totals(trainer: Trainer, loss: torch.Tensor, slots: list[list[RoutingSlot]]) -> torch.Tensor:
    """[loss, tokens of every expert of every MoE layer], summed over rounds and ranks in one fp64 all-reduce."""
    parts = [loss.view(1)]
    rounds = [torch.stack(counts) for each in slots if (counts := expert_counts(each))]
    if rounds:
        parts.append(torch.stack(rounds).sum(0).to(torch.float64).flatten())
    totals = torch.cat(parts)
    if trainer.groups is not None and trainer.groups.world is not None:
        dist.all_reduce(totals, group=trainer.groups.world)
        size = totals.numel() * totals.element_size()
        trainer.wire.ledger.count_ring("metric_reduce", trainer.groups.world_block, 2, size)
    return totals.cpu()


def _balance(trainer: Trainer, counts: torch.Tensor) -> None:
    layers = trainer.parameters.model.expert_layers
    for layer, of_layer in zip(layers, counts.view(len(layers), -1) if layers else (), strict=True):
        layer.update_bias(of_layer.to(trainer.device), trainer.train.balance_rate)


def _load(trainer: Trainer, counts: torch.Tensor) -> float:
    """Tokens of the fullest expert / mean, the worst of the layers; 0 without experts."""
    layers = trainer.parameters.model.expert_layers
    if not layers:
        return 0.0
    table = counts.view(len(layers), -1)
    return float((table.max(1).values / table.mean(1).clamp(min=1e-9)).max())


@contextmanager
def _phase(trainer: Trainer, phases: dict[str, float], name: str) -> Iterator[None]:
    inside = trainer.wire.ledger.seconds
    started, before = time.perf_counter(), sum(inside.values())
    trainer.progress.enter(name)
    with record_function(name):
        yield
    exchanged = sum(inside.values()) - before
    phases[name] = phases.get(name, 0.0) + time.perf_counter() - started - exchanged
    phases["exchange"] = phases.get("exchange", 0.0) + exchanged
