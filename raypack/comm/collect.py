"""Collectives of layers that keep tokens where they are: an all-gather in flight, and an exchange of a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from raypack.comm.wire import Wire
from raypack.plan.topology import Block

# torch 2.13 renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Gather:
    """An all-gather in flight. `wait` once; then the parts of all ranks of the block: [width, *sent.shape]."""

    parts: Tensor
    work: dist.Work
    wire: Wire
    op: str
    sent: Tensor

    def wait(self) -> Tensor:
        with self.wire.waiting(self.op):
            self.work.wait()
        return self.parts


def start_gather(sent: Tensor, block: Block, wire: Wire, op: str) -> Gather:
    """Begin to gather `sent`, of one shape on all ranks, over `block`; the ledger counts it to every other rank."""
    assert wire.groups is not None
    sent = sent.contiguous()
    parts = sent.new_empty((block.width, *sent.shape))
    if wire.poison:
        parts.fill_(float("nan"))
    work = all_gather(parts.view(-1), sent.view(-1), group=wire.groups[block], async_op=True)
    assert work is not None
    wire.ledger.count_copies(op, block, [sent.numel() * sent.element_size()] * block.width)
    return Gather(parts, work, wire, op, sent)


def swap(sent: Tensor, send: Sequence[int], receive: Sequence[int], block: Block, wire: Wire, op: str) -> Tensor:
    """All-to-all of rows over `block`: [sum(send), ...] -> [sum(receive), ...], both ordered by rank."""
    assert wire.groups is not None
    sent = sent.contiguous()
    out = sent.new_empty((sum(receive), *sent.shape[1:]))
    if wire.poison:
        out.fill_(float("nan"))
    with wire.waiting(op):
        dist.all_to_all_single(out, sent, list(receive), list(send), group=wire.groups[block])
    size = sent[:1].numel() * sent.element_size() if len(sent) else 0
    wire.ledger.count_copies(op, block, [rows * size for rows in send])
    return out
