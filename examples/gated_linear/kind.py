"""A layer kind of one's own: linear attention whose gate never closes further than `FLOOR` (as HGRN2, Qin et al. 2024).

raypack train --model.pattern GGGF --model.own_layers G=gated_linear.kind:GATED     # from the folder above this one

A kind is one record. This file is what the planner reads, and imports no torch; `module` is what ranks train, `oracle`
what tests compare it with. States travel as LASP-2 sends them, so host plan and costs are those of L layers, for a
model whose decay is a gate.
"""

from __future__ import annotations

from dataclasses import replace

from raypack.config import ModelConfig
from raypack.layers.kind import LayerCost, Work
from raypack.layers.linear.kind import LINEAR, LinearCosting

FLOOR = 0.9
"""Least share of a state that a token leaves."""


def gated(model: ModelConfig) -> ModelConfig:
    """The model with the gate that these layers have, whatever its L layers have."""
    return model.model_copy(update={"linear_decay": "gate"})


def work(model: ModelConfig) -> Work:
    """FLOPs of a layer besides projections and feed-forward."""
    return LINEAR.work(gated(model))


class Costing(LinearCosting):
    """As L layers, with the gates that travel beside the states."""

    def slot_bytes(self, layer: LayerCost, recompute: str) -> int:
        return super().slot_bytes(replace(layer, rates=replace(layer.rates, model=gated(layer.rates.model))), recompute)


GATED = replace(
    LINEAR,
    letter="G",
    name="gated linear",
    module="gated_linear.module:GatedLinear",
    oracle="gated_linear.oracle:gated_layer",
    work=work,
    costing=Costing(),
)
