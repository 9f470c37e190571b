"""Communicators: one for every legal block of two or more ranks, made once. The only caller of `new_group`.

8 ranks on one node have 7 groups; a step creates none (a communicator costs hundreds of MB on a GPU).
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

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
