"""Whether replicated weights are the same weights on every rank, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from raypack.comm.agreement import agree
from raypack.training.parameters import Sharded
from raypack.training.step import Trainer


def check_replicas(trainer: Trainer, step: int) -> None:
    """Compare masters and router biases of all ranks after `step` steps; sharded parameters exist only once.

    Every rank calls it. It reads all weights once: for checkpoints and resumes, not for every step.

    Raises:
        RaypackError: on all ranks, naming those whose weights differ.
    """
    if trainer.groups is None:
        return
    masters = [] if isinstance(trainer.parameters, Sharded) else list(trainer.parameters.masters.values())
    digest = weights_digest([*masters, *trainer.parameters.model.buffers()])
    agree(trainer.groups.host, digest, f"weights {digest.hex()[:12]} after {step} steps")


@torch.no_grad()
def weights_digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """SHA-256 over the bytes of the tensors, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
