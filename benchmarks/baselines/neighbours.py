"""Point-to-point messages along a ring of ranks, counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Ring:
    """The ranks of `group` in a ring.

    Attributes:
        sent: bytes that this rank sent.
        steps: messages that each had to wait for the one before, on the longest chain through this rank.
    """

    group: dist.ProcessGroup
    sent: int = 0
    steps: int = 0

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def width(self) -> int:
        return dist.get_world_size(self.group)

    def send(self, x: Tensor, to: int) -> None:
        """To the group's rank `to`; returns when the buffer is free."""
        dist.send(x.contiguous(), dist.get_global_rank(self.group, to), group=self.group)
        self.sent += x.numel() * x.element_size()

    def receive(self, like: Tensor, source: int) -> Tensor:
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(out, dist.get_global_rank(self.group, source), group=self.group)
        return out

    def pass_on(self, x: Tensor, *, chained: bool = True) -> Passing:
        """Begin to send `x` to the next rank and to receive from the one before; `chained`: it counts as a step."""
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        following, before = ((self.rank + step) % self.width for step in (1, -1))
        operations = [
            dist.P2POp(dist.isend, x, dist.get_global_rank(self.group, following), self.group),
            dist.P2POp(dist.irecv, out, dist.get_global_rank(self.group, before), self.group),
        ]
        works = dist.batch_isend_irecv(operations)
        self.sent += x.numel() * x.element_size()
        self.steps += chained
        return Passing(out, x, works)


@dataclass
class Passing:
    """A step of the ring in flight."""

    out: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.out
