"""Where the parameters live: a copy on every rank, or sharded over the world with FSDP2.

Both give the optimizer the same thing: `masters`, named tensors of at least fp32 whose `.grad` holds the exact sum over
ranks and rounds of the gradient of (sum of token losses / labels of the step). Every reduction is a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from raypack.comm.ledger import Ledger
from raypack.comm.wire import Groups
from raypack.config import ModelConfig, TrainSection
from raypack.kernels.attention import find_kernel
from raypack.model.decoder import HybridModel, initialize
from raypack.plan.topology import Block


def learning_rate(step: int, steps: int, train: TrainSection) -> float:
    """Of step 0, 1, ..., `steps` - 1: up to `lr` over the warm-up, then a half cosine down to `lr * lr_min_share`."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, steps - 1 - train.warmup_steps)
    low = train.lr * train.lr_min_share
    return low + (train.lr - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def build_optimizer(masters: Mapping[str, torch.Tensor], train: TrainSection) -> torch.optim.AdamW:
    """Weight decay on matrices; norms (one dimension) have none."""
    groups = [
        {"params": [p for p in masters.values() if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in masters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


BUCKET_BYTES = 64 * 2**20


class Parameters(Protocol):
    """See the module's text."""

    @property
    def model(self) -> HybridModel: ...

    @property
    def masters(self) -> Mapping[str, torch.Tensor]: ...

    def collect(self) -> None:
        """After each round's backward: add its gradients to the masters', never below fp32."""

    def reduce(self, ledger: Ledger) -> None:
        """After the last round's backward: make `masters[name].grad` the sum over all ranks."""

    def norm(self) -> torch.Tensor:
        """Global gradient norm, 0-dim, equal on all ranks."""

    def publish(self) -> None:
        """After the optimizer: make the model compute with the new masters."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters and reductions: never below fp32."""
    return torch.promote_types(dtype, torch.float32)


def build_parameters(
    config: ModelConfig, train: TrainSection, seed: int, groups: Groups | None, device: torch.device
) -> Parameters:
    """Build the model of `config`, filled from `seed` (the same in any world), in the way `train.shard` says.

    Raises:
        RaypackError: `train.kernel` names none.
    """
    kernel = find_kernel(train.kernel)
    kind = Sharded if train.shard == "world" else Replicated
    made: Parameters = kind(config, train, seed, groups, device, getattr(torch, train.dtype))
    made.model.use_kernel(kernel)
    return made


class Replicated:
    """Every rank has all parameters; gradients are summed in flat buckets, in the order of the parameters."""

    def __init__(
        self,
        config: ModelConfig,
        train: TrainSection,
        seed: int,
        groups: Groups | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        with torch.device(device):
            self.model = HybridModel(config, train.chunk_tokens)
        initialize(self.model, config, seed)
        self.groups = groups
        values = {name: p.detach().to(wide(dtype), copy=True) for name, p in self.model.named_parameters()}
        _cast_parameters(self.model, dtype)
        self._used = dict(self.model.named_parameters())
        # One tensor serves as both where the model computes in the master's dtype.
        self.masters = (
            dict(self._used) if wide(dtype) == dtype else {n: torch.nn.Parameter(v) for n, v in values.items()}
        )

    @torch.no_grad()
    def collect(self) -> None:
        for name, used in self._used.items():
            master = self.masters[name]
            if used is not master and used.grad is not None:
                master.grad = used.grad.to(master.dtype) if master.grad is None else master.grad.add_(used.grad)
                used.grad = None

    def reduce(self, ledger: Ledger) -> None:
        # By `requires_grad`, never by "has a gradient": all ranks reduce the same list.
        for names in self._buckets():
            grads = [_gradient(self.masters[n]) for n in names]
            flat = torch.cat([g.reshape(-1) for g in grads])
            if self.groups is not None and self.groups.world is not None:
                dist.all_reduce(flat, group=self.groups.world)
                size = flat.numel() * flat.element_size()
                ledger.count_ring("gradient_reduce", self.groups.world_block, 2, size)
            for name, grad in zip(names, flat.split([g.numel() for g in grads]), strict=True):
                self.masters[name].grad = grad.view_as(self.masters[name])

    def _buckets(self) -> Iterator[list[str]]:
        names: list[str] = []
        size = 0
        for name, p in self.masters.items():
            if not p.requires_grad:
                continue
            names.append(name)
            size += p.numel() * p.itemsize
            if size >= BUCKET_BYTES:
                yield names
                names, size = [], 0
        if names:
            yield names

    def norm(self) -> torch.Tensor:
        return get_total_norm([_gradient(p) for p in self.masters.values()])

    @torch.no_grad()
    def publish(self) -> None:
        for name, used in self._used.items():
            if used is not self.masters[name]:
                used.copy_(self.masters[name])


class Sharded:
    """FSDP2 over the world: a layer's parameters are gathered before it runs, its gradients scattered as a sum.

    FSDP2 divides by the world size unless told otherwise; the loss here is already divided by the labels of the whole
    step, so the factor is 1 and the reduction a plain sum.
    """

    def __init__(
        self,
        config: ModelConfig,
        train: TrainSection,
        seed: int,
        groups: Groups | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        group = groups.world if groups is not None and groups.world is not None else dist.group.WORLD
        assert group is not None  # sharded parameters need a process group, of one rank or more
        ranks = list(range(dist.get_world_size(group)))
        mesh = DeviceMesh.from_group(group, device.type, mesh=torch.tensor(ranks))
        # Inputs are not cast: FSDP2 would rebuild every dataclass among them (frames, routing slots) on the way.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide(dtype), cast_forward_inputs=False)
        with torch.device("meta"):
            self.model = HybridModel(config, train.chunk_tokens)
        # One layer at a time, so that no rank ever holds the whole model.
        for i, layer in enumerate(self.model.layers):
            layer.to_empty(device=device)
            initialize(layer, config, seed, prefix=f"layers.{i}.")
            layer.to(wide(dtype))
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        for name, child in self.model.named_children():
            if name != "layers":
                child.to_empty(device=device)
                initialize(child, config, seed, prefix=f"{name}.")
                child.to(wide(dtype))
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        for module in (*self.model.layers, self.model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.masters = dict(self.model.named_parameters())
        self.block = Block(0, len(ranks))
        self._in_layers = sum(p.numel() for p in self.model.layers.parameters())
        self._bytes = sum(p.numel() for p in self.model.parameters()), dtype.itemsize, wide(dtype).itemsize

    def count_round(self, ledger: Ledger, *, backward: bool) -> None:
        """Enter one round's parameter gathers and gradient scatter by formula.

        Layers are gathered for the forward and again for the backward; embedding, last norm and head stay gathered.
        """
        count, used, reduced = self._bytes
        gathered = count + self._in_layers if backward else count
        ledger.count_ring("parameter_gather", self.block, 1, gathered * used)
        if backward:
            ledger.count_ring("gradient_reduce", self.block, 1, count * reduced)

    def release(self) -> None:
        """After a forward without a backward: drop the gathered parameters, which the next update would outdate."""
        cast(FSDPModule, self.model).reshard()

    def collect(self) -> None:
        """FSDP2 has added this round's scattered sum to the masters' gradients."""

    def reduce(self, ledger: Ledger) -> None:
        for p in self.masters.values():
            if p.grad is None:
                raise AssertionError("a sharded parameter took no part in the step")

    def norm(self) -> torch.Tensor:
        total = get_total_norm([p.grad for p in self.masters.values() if p.grad is not None])
        return total.full_tensor() if isinstance(total, DTensor) else total

    def publish(self) -> None:
        """FSDP2 gathers from the masters themselves."""


def clip(parameters: Parameters, norm: torch.Tensor, limit: float) -> None:
    """Scale all gradients so that the global norm is at most `limit` (0 = leave them)."""
    if limit:
        clip_grads_with_norm_(parameters.masters.values(), limit, norm)


def _gradient(p: torch.Tensor) -> torch.Tensor:
    return p.grad if p.grad is not None else torch.zeros_like(p)


def _cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: router biases and other buffers keep their own precision."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.dtype != dtype:
                setattr(module, name, torch.nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad))
