"""The cost model of a model on a cluster: its rates, and what each of its layer kinds asks (docs/planning.md)."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from raypack.config import ModelConfig
from raypack.cost.rates import TRAIN_PASSES, Rates, token_flops
from raypack.layers.kind import LayerCost
from raypack.layers.kinds import kinds_of


class Costs(Rates):
    """`Rates` with the model's layers."""

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """One entry a kind that the model has, kinds at the parent first.

        Raises:
            RaypackError: a letter of the pattern that names no kind.
        """
        return tuple(LayerCost(kind, self.model.kinds.count(kind.letter), self) for kind in kinds_of(self.model))

    @cached_property
    def at_parent(self) -> tuple[int, ...]:
        """Indices into `layers` of the kinds that the samples' parents compute."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind.at == "parent")

    @cached_property
    def at_child(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind.at == "child")

    def token_seconds(self, recompute: str) -> float:
        """Seconds of one token in all layers but for attention, all passes of a step."""
        every = len(self.model.kinds) * self.layer_seconds(recompute)
        return every + sum(layer.count * layer.token_seconds(recompute) for layer in self.layers)

    def amounts(self, lengths: np.ndarray) -> np.ndarray:
        """What the cost of a sample is linear in: tokens, pairs for each of `layers`, and 1: [amounts, lengths]."""
        columns = [lengths.astype(np.float64), *(layer.pairs(lengths) for layer in self.layers), np.ones(len(lengths))]
        return np.stack(columns)


def train_flops(model: ModelConfig, lengths: ArrayLike) -> dict[str, np.ndarray]:
    """Forward and backward FLOPs of each document: by layer kind (its name), projections, feed_forward, head.

    Each value has the shape of `lengths` (float64). Replays are no model FLOPs and are not counted.
    """
    n = np.asarray(lengths, dtype=np.float64)
    each, layers, found = token_flops(model), len(model.kinds), dict[str, np.ndarray]()
    for kind in kinds_of(model):
        work, count = kind.work(model), TRAIN_PASSES * model.kinds.count(kind.letter)
        pairs = kind.pairs(model, np.asarray(lengths)).astype(np.float64)
        found[kind.name] = count * work.pair * pairs + count * work.token * n
    found["projections"] = TRAIN_PASSES * layers * each.projections * n
    found["feed_forward"] = TRAIN_PASSES * layers * each.feed_forward * n
    found["head"] = TRAIN_PASSES * each.head * n
    return found


def model_flops(model: ModelConfig, lengths: ArrayLike) -> float:
    """Forward and backward FLOPs of a step with documents of these lengths, output head included."""
    return float(sum(part.sum() for part in train_flops(model, lengths).values()))
