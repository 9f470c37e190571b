"""What one rank communicates with: its groups, its ledger, buffers that are used again, and the all-to-all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.profiler import record_function

from raypack.comm.ledger import Ledger
from raypack.errors import RaypackError
from raypack.plan.topology import Block, Topology


def backend_for(device: torch.device) -> str:
    """NCCL on CUDA, gloo on CPUs.

    Raises:
        RaypackError: any other device.
    """
    backends = {"cuda": "nccl", "cpu": "gloo"}
    if device.type not in backends:
        raise RaypackError(f"device {device.type!r}: groups exist for cuda (NCCL) and cpu (gloo)")
    return backends[device.type]


class Groups:
    """The groups of all legal blocks. Every rank constructs it, in the same place, with the same arguments.

    Args:
        topology: all ranks of the default process group.
        device: selects the backend of the block groups.
        timeout: seconds; set on each group, since `new_group` does not inherit the default one.

    Attributes:
        host: a CPU (gloo) group of the whole world for agreement; None in a world of one rank.
        storage: another one, for the thread that writes checkpoints while steps go on (calls of two threads on one
            group would mix); None in a world of one rank.
    """

    def __init__(self, topology: Topology, device: torch.device, timeout: float) -> None:
        if dist.get_world_size() != topology.world:
            raise RaypackError(
                f"topology nodes = {list(topology.nodes)} add up to {topology.world} ranks, the process group has "
                f"{dist.get_world_size()}: make them equal"
            )
        self.topology = topology
        self.rank = dist.get_rank()
        backend, limit = backend_for(device), timedelta(seconds=timeout)
        self._by_block: dict[Block, dist.ProcessGroup] = {}
        for block in topology.group_blocks:
            ranks = list(range(block.first, block.end))
            self._by_block[block] = dist.new_group(ranks, timeout=limit, backend=backend)
        self.world_block = Block(0, topology.world)
        self.host: dist.ProcessGroup | None = self._by_block.get(self.world_block)
        if backend != "gloo":
            self.host = dist.new_group(list(range(topology.world)), timeout=limit, backend="gloo")
        self.storage: dist.ProcessGroup | None = None
        if topology.world > 1:
            self.storage = dist.new_group(list(range(topology.world)), timeout=limit, backend="gloo")

    def __getitem__(self, block: Block) -> dist.ProcessGroup:
        return self._by_block[block]

    def __len__(self) -> int:
        return len(self._by_block)

    @property
    def world(self) -> dist.ProcessGroup | None:
        """The device group of all ranks; None in a world of one."""
        return self._by_block.get(self.world_block)


class Wire:
    """The groups and the ledger of one rank.

    Buffers that live no longer than one exchange are kept and used again, at the largest size so far: every step has
    other sizes, and a fresh large buffer costs page faults on a CPU and fragments a GPU's memory.

    Args:
        poison: fill receive buffers with NaN first (tests: whatever is not received must never be read).

    Attributes:
        inside: the exchange or collective that this rank waits in; "" = it does not wait for others.
    """

    def __init__(self, groups: Groups | None, ledger: Ledger, *, poison: bool = False) -> None:
        self.groups = groups
        self.ledger = ledger
        self.poison = poison
        self.inside = ""
        self._kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    @classmethod
    def alone(cls) -> Wire:
        """Of the only rank there is: it meets nobody."""
        return cls(None, Ledger(Topology((1,)), 0))

    def scratch(self, use: str, vectors: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer [vectors, head_dim] of the kind of `like`; its content is lost at the next call for this `use`."""
        key, size = (use, like.dtype, like.device), vectors * like.shape[-1]
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            kept = self._kept[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return kept[:size].view(vectors, like.shape[-1])

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Around a wait for other ranks, for the ledger's seconds. After an error `inside` says where it happened."""
        self.inside, started = name, time.perf_counter()
        yield
        self.ledger.seconds[name] += time.perf_counter() - started
        self.inside = ""

    def all_to_all(
        self,
        out: torch.Tensor,
        sent: torch.Tensor,
        block: Block,
        site: str,
        send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> None:
        """One unequal all-to-all of [vectors, head_dim] on the group of `block`: `send[i]` vectors go to its rank i."""
        if self.groups is None:
            raise AssertionError("an exchange of several ranks needs groups")
        if self.poison:
            out.fill_(float("nan"))
        with self.waiting(site), record_function(f"exchange {site}"):
            dist.all_to_all_single(out, sent, list(receive), list(send), group=self.groups[block])
        self.ledger.count_exchange(site, block, send, sent.shape[-1] * sent.element_size())
