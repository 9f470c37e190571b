"""What the tests of the invariant run on every rank of the pool, and the one-rank oracle they compare with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups, Wire
from raypack.config import ModelConfig, TrainSection
from raypack.errors import RaypackError
from raypack.model.decoder import HybridModel, initialize
from raypack.model.moe import Routing
from raypack.model.reference import reference_loss
from raypack.plan.plan import Plan
from raypack.plan.topology import Topology
from raypack.training.parameters import Sharded, build_optimizer, build_parameters
from raypack.training.step import Trainer, evaluate_loss, train_step
from raypack.training.work import StepWork, prepare


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; documents are a pure function of (sample, length)."""

    model: ModelConfig
    train: TrainSection = field(default_factory=lambda: TrainSection(dtype="float64", chunk_tokens=16))
    seed: int = 3
    masked: tuple[int, ...] = ()  # samples without any label
    device: str = "cpu"  # "cuda" = the rank's own


def tiny_model(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "pattern": "FS", "layers": 2, "width": 12, "heads": 4, "kv_heads": 2, "head_dim": 4, "window": 5,
        "vocabulary": 23, "experts": 4, "experts_active": 2, "expert_width": 6, "ffn_width": 10,
    }  # fmt: skip
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


def make_trainer(
    case: Case, topology: Topology, steps: int = 20, poison: bool = True, groups: Groups | None = None
) -> Trainer:
    device = torch.device(case.device)
    groups = groups or Groups(topology, device, timeout=60.0)
    ledger = Ledger(topology, dist.get_rank())
    parameters = build_parameters(case.model, case.train, case.seed, groups, device)
    optimizer = build_optimizer(parameters.masters, case.train)
    return Trainer(parameters, optimizer, case.train, steps, Wire(groups, ledger, poison=poison), groups, device)


def full(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().double().cpu().numpy().copy()


def gradients_on_rank(rank: int, world: int, case: Case, plan: Plan) -> tuple[float, dict[str, np.ndarray], dict]:
    """Loss of the step, gradient of every parameter, ledger."""
    trainer = make_trainer(case, plan.topology)
    return gradients(trainer, case, prepare(plan, plan.topology, rank, case.model, loader(case)))


def gradients(trainer: Trainer, case: Case, work: StepWork) -> tuple[float, dict[str, np.ndarray], dict]:
    """As `gradients_on_rank`; the weights stay as they are, the router's bias moves."""
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


def compared_on_rank(rank: int, world: int, cases: list[tuple[Case, Plan]]) -> list[tuple[bytes, float | None]]:
    """Every case (of one topology) on this rank: a digest of the loss (with and without gradients) and of all
    gradients, and how far they are off.

    The ranks share the work of the oracle: each compares every `world`-th case, for all where the digests are equal.
    """
    groups = Groups(cases[0][1].topology, torch.device("cpu"), timeout=60.0)
    found = []
    for number, (case, plan) in enumerate(cases):
        try:
            trainer = make_trainer(case, plan.topology, groups=groups)
            work = prepare(plan, plan.topology, rank, case.model, loader(case))
            held_out = evaluate_loss(trainer, work)  # first: a step moves the router's bias
            loss, grads, _ = gradients(trainer, case, work)
            losses = loss, held_out
        except Exception as error:
            raise AssertionError(f"case {number} of {len(cases)}: {case}, {plan}") from error
        digest = hashlib.sha256(repr(losses).encode())
        for name in sorted(grads):
            digest.update(grads[name].tobytes())
        found.append((digest.digest(), error_of(case, plan, losses, grads) if number % world == rank else None))
    return found


def error_of(case: Case, plan: Plan, losses: tuple[float, ...], grads: dict[str, np.ndarray]) -> float:
    """The largest relative error of the losses and of any gradient (of its largest entry, at least 1e-3)."""
    right, expected = oracle(case, plan)
    assert grads.keys() == expected.keys()
    off = [np.abs(grads[n] - e).max() / max(1e-3, np.abs(e).max()) for n, e in expected.items()]
    return float(max(*(abs(loss / right - 1) for loss in losses), *off))


def losses_on_rank(
    rank: int, world: int, case: Case, plans: list[Plan], steps: int | None = None
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train one step a plan, of a run of `steps`, by default as many: the losses, and the weights at the end."""
    trainer = make_trainer(case, plans[0].topology, steps=steps or len(plans), poison=False)
    losses = []
    for plan in plans:
        work = prepare(plan, plan.topology, rank, case.model, loader(case))
        losses.append(train_step(trainer, work).loss)
    return losses, {name: full(p) for name, p in trainer.parameters.masters.items()}


class Plain:
    """The model of a case on one rank without any parallelism, by the slow reference.

    Attributes:
        parameters: leaves, under the names that the product gives them.
    """

    def __init__(self, case: Case) -> None:
        model = HybridModel(case.model)
        initialize(model, case.model, case.seed)
        self.case, dtype = case, getattr(torch, case.train.dtype)
        self.parameters = {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}
        self._state = self.parameters | dict(model.named_buffers())

    def loss(self, plan: Plan) -> torch.Tensor:
        """Mean over the plan's labels."""
        case = self.case
        documents = [document(p.sample, p.length, case.model.vocabulary) for p in plan.placements]
        labels = [
            labels_of(d) if p.sample not in case.masked else np.full(len(d), -100)
            for d, p in zip(documents, plan.placements, strict=True)
        ]
        total = reference_loss(
            case.model, self._state, [torch.from_numpy(d) for d in documents], [torch.from_numpy(x) for x in labels]
        )
        return total / max(1, plan.labels)


def oracle(case: Case, plan: Plan) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the same samples on one rank."""
    plain = Plain(case)
    loss = plain.loss(plan)
    grads = torch.autograd.grad(loss, list(plain.parameters.values()), allow_unused=True)
    pairs = zip(plain.parameters.items(), grads, strict=True)
    return float(loss.detach()), {n: full(g if g is not None else torch.zeros_like(p)) for (n, p), g in pairs}


def hidden_on_rank(
    rank: int, world: int, case: Case, plan: Plan, change: tuple[int, int] | None
) -> dict[tuple[int, int], np.ndarray]:
    """The last hidden state of every (sample, position) this rank holds; `change` = a token to replace."""
    trainer = make_trainer(case, plan.topology)
    model = trainer.parameters.model
    found: dict[tuple[int, int], np.ndarray] = {}
    for each in prepare(plan, plan.topology, rank, case.model, loader(case)).rounds:
        s = each.frame.segments
        samples = np.repeat(each.frame.samples[s.placement], s.lengths)
        where = list(zip(samples.tolist(), s.positions.tolist(), strict=True))
        tokens = each.tokens.clone()
        for row, place in enumerate(where):
            if place == change:
                tokens[row] = (tokens[row] + 1) % case.model.vocabulary
        kept: list[torch.Tensor] = []
        hook = model.norm.register_forward_pre_hook(lambda _, x, kept=kept: kept.append(x[0].detach()))
        with torch.no_grad():
            model(tokens, each.labels, each.frame, trainer.wire)
        hook.remove()
        found.update({place: kept[0][row].numpy().copy() for row, place in enumerate(where)})
    return found


Rows = dict[tuple[int, int], np.ndarray]
"""A vector for (sample, position)."""


def layer_outputs_on_rank(rank: int, world: int, case: Case, plan: Plan) -> dict[str, Rows]:
    """What the attention and the feed-forward part of every layer add to each token that this rank holds."""
    trainer = make_trainer(case, plan.topology)
    model = trainer.parameters.model
    found: dict[str, Rows] = {}
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            kept[name] = out[0] if isinstance(out, tuple) else out  # of a MoE: rows and their routing

        return hook

    for number, layer in enumerate(model.layers):
        for part in ("attention", "ffn"):
            getattr(layer, part).register_forward_hook(keep(f"{number}.{part}"))
    for each in prepare(plan, plan.topology, rank, case.model, loader(case)).rounds:
        s = each.frame.segments
        samples = np.repeat(each.frame.samples[s.placement], s.lengths)
        where = list(zip(samples.tolist(), s.positions.tolist(), strict=True))
        with torch.no_grad():
            model(each.tokens, each.labels, each.frame, trainer.wire)
        for name, rows in kept.items():
            found.setdefault(name, {}).update(zip(where, full(rows), strict=True))
    return found


Routings = dict[tuple[int, int, int], list[int]]
"""Experts chosen for (layer, sample, position)."""


def routed_gradients_on_rank(
    rank: int, world: int, case: Case, plan: Plan, saved: Routings | None
) -> tuple[float, dict[str, np.ndarray], Routings]:
    """As `gradients_on_rank`; with `saved`, the router's choices are taken from it. Returns the choices too."""
    trainer = make_trainer(case, plan.topology)
    model = trainer.parameters.model
    chosen: Routings = {}
    total = 0.0
    for each in prepare(plan, plan.topology, rank, case.model, loader(case)).rounds:
        s = each.frame.segments
        samples = np.repeat(each.frame.samples[s.placement], s.lengths).tolist()
        where = list(zip(samples, s.positions.tolist(), strict=True))
        slots = model.slots()
        if saved is not None:
            for layer, slot in enumerate(slots):
                rows = [saved[layer, sample, position] for sample, position in where]
                experts = torch.tensor(rows, dtype=torch.int64).view(len(where), case.model.experts_active)
                counts = torch.bincount(experts.flatten(), minlength=case.model.experts)
                slot.routing = Routing(experts, counts)
        loss = model(each.tokens, each.labels, each.frame, trainer.wire, slots)
        (loss / plan.labels).backward()
        trainer.parameters.collect()
        total += float(loss.detach())
        for layer, slot in enumerate(slots):
            for (sample, position), experts in zip(where, slot.routing.experts.tolist(), strict=True):
                chosen[layer, sample, position] = experts
    trainer.parameters.reduce(trainer.wire.ledger)
    grads = {name: full(p.grad) for name, p in trainer.parameters.masters.items()}
    return total / plan.labels, grads, chosen


def stepping_on_rank(rank: int, world: int, case: Case, plans: list[Plan], spoil: int | None) -> list[Any]:
    """Steps through `plans`; at step `spoil` one weight of rank 1 is infinite, and as it was after it."""
    trainer = make_trainer(case, plans[0].topology, poison=False)
    out = []
    for number, plan in enumerate(plans):
        name, weight = next(iter(trainer.parameters.masters.items()))
        before = full(weight)
        local = (weight.to_local() if hasattr(weight, "to_local") else weight).detach()
        kept = local.clone()
        if number == spoil and rank == 1:
            local.fill_(float("inf"))
        work = prepare(plan, plan.topology, rank, case.model, loader(case))
        result = train_step(trainer, work)
        if number == spoil and rank == 1:
            local.copy_(kept)
        after = {n: full(p) for n, p in trainer.parameters.masters.items()}
        out.append((result.loss, result.applied, after, bool(np.array_equal(before, after[name]))))
    return out


def disagreeing_on_rank(rank: int, world: int, case: Case, plans: list[list[Plan]], trouble: dict[int, str]) -> str:
    """Rank r runs plans[r] in order; returns the text of the error it got."""
    trainer = make_trainer(case, plans[0][0].topology, poison=False)
    try:
        for plan in plans[rank]:
            work = prepare(plan, plan.topology, rank, case.model, loader(case))
            train_step(trainer, None if rank in trouble else work, trouble.get(rank))
    except RaypackError as error:
        return str(error)
    return "no error"


def groups_made_on_rank(rank: int, world: int, case: Case, plans: list[Plan], calls: list[int]) -> tuple[int, int]:
    """Groups after the start, and how many more were made while stepping; `calls` has the rank of each that is made."""
    trainer = make_trainer(case, plans[0].topology, poison=False)
    assert trainer.groups is not None
    made = len(trainer.groups), calls.count(rank)
    for plan in plans:
        train_step(trainer, prepare(plan, plan.topology, rank, case.model, loader(case)))
    return made[0], calls.count(rank) - made[1]
