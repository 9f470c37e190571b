"""What one round asks of every rank: seconds, bytes and memory, exact to the token (docs/planning.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypack.cost.rates import PASSES
from raypack.exchange.asks import Bytes, exchange_seconds
from raypack.exchange.cohorts import Shards, cut_round
from raypack.layers.costs import Costs
from raypack.layers.kind import LayerCost
from raypack.plan.grid import grid, unions
from raypack.plan.table import RoundTable, Table
from raypack.plan.topology import Topology


@dataclass(frozen=True)
class LayerLoad:
    """One layer kind on every rank: arrays [world], seconds of one layer with all passes of a step.

    Attributes:
        compute: attention with its launches, recurrence.
        exchange: bytes on their way, beyond what attention hides.
        latency: of the collectives.
        held: tokens x heads held / heads of one token (count).
        sent: bytes of all layers of the kind.
    """

    compute: np.ndarray
    exchange: np.ndarray
    latency: np.ndarray
    held: np.ndarray
    sent: Bytes

    @property
    def seconds(self) -> np.ndarray:
        return self.compute + self.exchange + self.latency


@dataclass(frozen=True)
class RoundLoad:
    """One round on every rank. Arrays [world].

    Attributes:
        layers: one entry for each of `costs.layers`.
        linear: projections and feed-forward of any layer, seconds of one layer, all passes of a step.
        tokens: child tokens (count).
        pack_first, pack_end: rank intervals of the packs, in rank order.
        recompute: of the round.
    """

    costs: Costs
    layers: tuple[LayerLoad, ...]
    linear: np.ndarray
    tokens: np.ndarray
    pack_first: np.ndarray
    pack_end: np.ndarray
    recompute: str

    def of(self, letter: str) -> LayerLoad:
        """The load of one layer kind."""
        return next(
            load for load, cost in zip(self.layers, self.costs.layers, strict=True) if cost.kind.letter == letter
        )

    @cached_property
    def held(self) -> np.ndarray:
        """Most of any kind's layers."""
        return np.max([np.zeros(len(self.tokens)), *(load.held for load in self.layers)], axis=0)

    @property
    def sent(self) -> Bytes:
        """{site: (intra, inter)}, of all layers."""
        found: Bytes = {}
        for load in self.layers:
            for site, (intra, inter) in load.sent.items():
                before = found.get(site, (np.int64(0), np.int64(0)))
                found[site] = (before[0] + intra, before[1] + inter)
        return found


def load_round(rows: RoundTable, topology: Topology, costs: Costs, recompute: str) -> RoundLoad:
    """Apply the cost model to one round of a legal plan."""
    shards = cut_round(rows, grid(topology))
    first, end = unions(shards.cohorts.parent_first, shards.cohorts.parent_width)
    return RoundLoad(
        costs=costs,
        layers=tuple(_layer_load(layer, shards, recompute) for layer in costs.layers),
        linear=shards.tokens * costs.layer_seconds(recompute),
        tokens=shards.tokens,
        pack_first=first,
        pack_end=end,
        recompute=recompute,
    )


def _layer_load(layer: LayerCost, shards: Shards, recompute: str) -> LayerLoad:
    asked, rates, passes = layer.kind.costing.ask(layer, shards, recompute), layer.rates, PASSES[recompute].exchange
    moving = exchange_seconds(asked.inward, rates) + exchange_seconds(asked.outward, rates)
    launches = asked.calls * passes * rates.cluster.launch_seconds
    compute = asked.pairs * layer.attention_seconds(recompute) + launches
    sent = {site: (layer.count * intra, layer.count * inter) for site, (intra, inter) in asked.sent.items()}
    if site := layer.kind.site:
        for direction, sides in (("in", asked.inward), ("out", asked.outward)):
            intra, inter = (sides[:2] * rates.head_bytes).astype(np.int64)
            sent[f"{site}_{direction}"] = (intra * layer.count * passes, inter * layer.count * passes)
    return LayerLoad(
        compute=compute + shards.tokens * layer.token_seconds(recompute),
        exchange=moving * passes + asked.seconds,
        latency=asked.latency,
        held=asked.held / rates.held_heads,
        sent=sent,
    )


def load_rounds(table: Table, topology: Topology, costs: Costs) -> list[RoundLoad]:
    """The rounds of a plan in array form."""
    return [
        load_round(table.in_round(number), topology, costs, recompute)
        for number, recompute in enumerate(table.recompute)
    ]
