"""A trainer's tensors as checkpoints hold them, and a copy of them in host memory that training does not touch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from raypack.comm.wire import Groups

Tensors = dict[str, torch.Tensor]


class Weights(Protocol):
    """A model's parameters as they are trained, whole or this rank's share of them."""

    @property
    def masters(self) -> Mapping[str, torch.Tensor]:
        """What the optimizer updates, by name."""

    @property
    def model(self) -> torch.nn.Module:
        """Whose buffers (router biases) are saved too."""

    def publish(self) -> None:
        """Bring the model up to date with the masters."""


class Trained(Protocol):
    """What one rank saves and loads. `groups` = None in a world of one."""

    @property
    def parameters(self) -> Weights: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def groups(self) -> Groups | None: ...


def tensors_of(trainer: Trained) -> Tensors:
    """Masters, router biases and optimizer moments (made, as zeros, where no step has been taken), by name."""
    named = {f"masters.{name}": p.detach() for name, p in trainer.parameters.masters.items()}
    named.update({f"buffers.{name}": b for name, b in trainer.parameters.model.named_buffers()})
    names = {id(p): name for name, p in trainer.parameters.masters.items()}
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:
            state = trainer.optimizer.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    named[f"optimizer.{names[id(p)]}.{key}"] = value
    return named


def share(tensors: Mapping[str, torch.Tensor], rank: int, world: int) -> Tensors:
    """What `rank` writes: its shards of sharded tensors, and of those that every rank has about 1 / `world` of the
    bytes. Largest first, each to the rank with the least so far: the same split on every rank."""
    whole = {name: t for name, t in tensors.items() if not isinstance(t, DTensor)}
    mine: Tensors = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
    loads = [0] * world
    for name in sorted(whole, key=lambda name: (-whole[name].nbytes, name)):
        least = loads.index(min(loads))
        loads[least] += whole[name].nbytes
        if least == rank:
            mine[name] = whole[name]
    return mine


class Stage:
    """Buffers in host memory (pinned where the tensors are on a GPU), made once and filled by every `copy`."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` = CPU group of all ranks; None in a world of one."""
        self._group = group
        self._staged: Tensors = {}
        self._mesh: DeviceMesh | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Copies of `tensors`, valid until the next call; the same names each time."""
        on_gpu = False
        for name, tensor in tensors.items():
            source = _local(tensor)
            if name not in self._staged:
                self._staged[name] = self._room(tensor, source)
            _local(self._staged[name]).copy_(source, non_blocking=source.is_cuda)
            on_gpu |= source.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        return self._staged

    def _room(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        if not isinstance(tensor, DTensor):
            return buffer
        return DTensor.from_local(
            buffer, self._host_mesh(), tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def _host_mesh(self) -> DeviceMesh:
        """The world on CPUs: a sharded tensor's copy in host memory still says which part of the whole it is."""
        if self._mesh is None:
            group = self._group if self._group is not None else dist.group.WORLD
            assert group is not None  # without a process group nothing is sharded
            self._mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.arange(dist.get_world_size(group)))
        return self._mesh


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
