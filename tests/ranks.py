"""What the tests of the invariant run on every rank of the pool, and the one-rank oracle they compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raypack.config import ModelConfig, TrainSection
from raypack.model.hybrid import HybridModel, initialize
from raypack.model.reference import reference_loss
from raypack.parallel.groups import Groups
from raypack.parallel.ledger import Ledger
from raypack.parallel.topology import Topology
from raypack.parallel.wire import Wire
from raypack.planning.plan import Plan
from raypack.training.optimizer import build_optimizer
from raypack.training.parameters import Sharded, build_parameters
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; documents are a pure function of (sample, length)."""

    model: ModelConfig
    train: TrainSection = field(default_factory=lambda: TrainSection(dtype="float64", chunk_tokens=16))
    seed: int = 3
    masked: tuple[int, ...] = ()  # samples without any label


def tiny_model(**changes: Any) -> ModelConfig:
    values = dict(
        pattern="FS", layers=2, width=12, heads=4, kv_heads=2, head_dim=4, window=5, vocabulary=23,
        experts=4, experts_active=2, expert_width=6, ffn_width=10, norm_eps=1e-6,
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})


def document(sample: int, length: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng([7, sample]).integers(0, vocabulary, length)


def labels_of(tokens: np.ndarray) -> np.ndarray:
    return np.concatenate([tokens[1:], [-100]])


def loader(case: Case):
    """A row loader over `document`."""

    def load(samples, lengths, lows, highs):
        tokens, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for sample, length, low, high in zip(samples, lengths, lows, highs, strict=True):
            words = document(int(sample), int(length), case.model.vocabulary)
            targets = labels_of(words) if int(sample) not in case.masked else np.full(len(words), -100)
            tokens.append(words[low:high])
            labels.append(targets[low:high])
        return np.concatenate(tokens), np.concatenate(labels)

    return load


def make_trainer(case: Case, topology: Topology, steps: int = 20, poison: bool = True) -> Trainer:
    device = torch.device("cpu")
    groups = Groups(topology, device, timeout=60.0)
    ledger = Ledger(topology, dist.get_rank())
    parameters = build_parameters(case.model, case.train, case.seed, groups, device)
    optimizer = build_optimizer(parameters.masters, case.train)
    return Trainer(parameters, optimizer, case.train, steps, Wire(groups, ledger, poison=poison), groups, device)


def full(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().double().numpy().copy()


def gradients_on_rank(rank: int, world: int, case: Case, plan: Plan) -> tuple[float, dict[str, np.ndarray], dict]:
    """Loss of the step, gradient of every parameter, ledger."""
    trainer = make_trainer(case, plan.topology)
    work = prepare(plan, plan.topology, rank, case.model, loader(case))
    seen: dict[str, np.ndarray] = {}

    def read(*_: Any) -> None:
        seen.update({name: full(p.grad) for name, p in trainer.parameters.masters.items()})

    trainer.parameters.publish = lambda: None  # keep the weights as they are
    trainer.optimizer.step = read
    trainer.train = trainer.train.model_copy(update={"clip_norm": 0.0})
    result = train_step(trainer, work)
    ledger = {"exchanged": dict(trainer.wire.ledger.exchanged), "collected": dict(trainer.wire.ledger.collected)}
    assert isinstance(trainer.parameters, Sharded) == (case.train.shard == "world")
    return result.loss, seen, ledger


def losses_on_rank(rank: int, world: int, case: Case, plans: list[Plan]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train one step a plan: the losses, and the weights at the end."""
    trainer = make_trainer(case, plans[0].topology, steps=len(plans), poison=False)
    losses = []
    for plan in plans:
        work = prepare(plan, plan.topology, rank, case.model, loader(case))
        losses.append(train_step(trainer, work).loss)
    return losses, {name: full(p) for name, p in trainer.parameters.masters.items()}


def oracle(case: Case, plan: Plan) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the same samples on one rank without any parallelism, by the slow reference."""
    dtype = getattr(torch, case.train.dtype)
    model = HybridModel(case.model)
    initialize(model, case.model, case.seed)
    state = {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}
    named = {reference_name(name): p for name, p in state.items()}
    named.update({reference_name(name): b for name, b in model.named_buffers()})
    documents = [document(p.sample, p.length, case.model.vocabulary) for p in plan.placements]
    labels = [
        labels_of(d) if p.sample not in case.masked else np.full(len(d), -100)
        for d, p in zip(documents, plan.placements, strict=True)
    ]
    total = reference_loss(
        case.model, named, [torch.from_numpy(d) for d in documents], [torch.from_numpy(x) for x in labels]
    )
    loss = total / max(1, plan.labels)
    grads = torch.autograd.grad(loss, list(state.values()), allow_unused=True)
    pairs = zip(state.items(), grads, strict=True)
    return float(loss), {n: full(g if g is not None else torch.zeros_like(p)) for (n, p), g in pairs}


def reference_name(name: str) -> str:
    name = name.replace(".attention.", ".")
    return name + ".weight" if name.endswith(("q_norm", "k_norm")) else name
