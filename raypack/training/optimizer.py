"""AdamW with linear warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from raypack.config import TrainSection


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
