"""When every rank is done with every round: the three meanings of `sync` (docs/planning.md).

- `step`: ranks meet only at the exchanges of full layers, inside their pack. A pack takes the largest full part plus
  the largest cheap part over its ranks, plus its exchanges; it starts when the last of its ranks has left the round
  before.
- `layer`: parameters are gathered layer by layer over the world, so no rank enters a layer before every rank has
  entered the one `prefetch_layers` before it (0: has left the last one).
- `node`: ranks of a node enter every layer together (expert parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raypack.layers.costs import Costs
from raypack.plan.grid import grid, interval_max
from raypack.plan.topology import Topology
from raypack.planning.load import LayerLoad, RoundLoad


@dataclass(frozen=True)
class Clock:
    """Seconds of a step. `busy` [world]: a rank's own work, exchanges and round costs; the rest it waits."""

    seconds: float
    busy: np.ndarray


@dataclass(frozen=True)
class PackSeconds:
    """A round's packs in rank order. Arrays [packs]: rank interval; full, cheap and exchange seconds of the round."""

    first: np.ndarray
    end: np.ndarray
    full: np.ndarray
    cheap: np.ndarray
    exchange: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        return self.full + self.cheap + self.exchange


def cheap_seconds(load: RoundLoad, costs: Costs) -> np.ndarray:
    """Everything of a round but what parents compute and their exchanges, on every rank."""
    own = np.zeros(len(load.tokens))
    for i in costs.at_child:
        own = own + costs.layers[i].count * load.layers[i].seconds
    return own + len(costs.model.kinds) * load.linear


def pack_seconds(load: RoundLoad, costs: Costs) -> PackSeconds:
    """`round_seconds` counts as exchange: every rank of a pack spends it."""
    first, end = load.pack_first, load.pack_end
    full, exchange = np.zeros(len(first)), np.zeros(len(first))
    for i in costs.at_parent:
        count, layer = costs.layers[i].count, load.layers[i]
        full = full + count * interval_max(layer.compute, first, end)
        exchange = exchange + count * (
            interval_max(layer.exchange, first, end) + interval_max(layer.latency, first, end)
        )
    return PackSeconds(
        first,
        end,
        full=full,
        cheap=interval_max(cheap_seconds(load, costs), first, end),
        exchange=exchange + costs.cluster.round_seconds,
    )


def run_clock(loads: Sequence[RoundLoad], topology: Topology, costs: Costs, sync: str) -> Clock:
    """The longest path through the rounds of a step."""
    busy = np.zeros(topology.world)
    for load in loads:
        busy += _own_seconds(load, costs)
    seconds = max((float(ends.max()) for ends in round_ends(loads, topology, costs, sync)), default=0.0)
    return Clock(seconds, busy)


def full_seconds(load: RoundLoad, costs: Costs) -> np.ndarray:
    """What parents compute in a round, on every rank, without exchanges."""
    return sum((costs.layers[i].count * load.layers[i].compute for i in costs.at_parent), np.zeros(len(load.tokens)))


def full_exchange_seconds(load: RoundLoad, costs: Costs) -> np.ndarray:
    """The exchanges of what parents compute, and `round_seconds`, on every rank."""
    spent = np.zeros(len(load.tokens))
    for i in costs.at_parent:
        spent = spent + costs.layers[i].count * (load.layers[i].exchange + load.layers[i].latency)
    for a, b in zip(load.pack_first.tolist(), load.pack_end.tolist(), strict=True):
        spent[a:b] += costs.cluster.round_seconds
    return spent


def _own_seconds(load: RoundLoad, costs: Costs) -> np.ndarray:
    return full_seconds(load, costs) + full_exchange_seconds(load, costs) + cheap_seconds(load, costs)


def round_ends(loads: Sequence[RoundLoad], topology: Topology, costs: Costs, sync: str) -> Iterator[np.ndarray]:
    """When each rank is done with each round, float64 [world], round by round; a step takes until the last is done."""
    clock, entered = np.zeros(topology.world), list[float]()
    for load in loads:
        if sync == "step":
            clock = _after_packs(load, clock, costs)
        else:
            clock = after_layers(load, clock, entered, topology, costs, sync)
        yield clock


def _after_packs(load: RoundLoad, clock: np.ndarray, costs: Costs) -> np.ndarray:
    packs = pack_seconds(load, costs)
    end = interval_max(clock, packs.first, packs.end) + packs.seconds
    clock = clock.copy()
    for a, b, t in zip(packs.first.tolist(), packs.end.tolist(), end.tolist(), strict=True):
        clock[a:b] = t
    return clock


def after_layers(
    load: RoundLoad, clock: np.ndarray, entered: list[float], topology: Topology, costs: Costs, sync: str
) -> np.ndarray:
    """When every rank is done with a round that it enters at `clock`, where layers are waited for (`layer`, `node`).

    `entered` = when the last rank entered each layer so far; grows by this round's layers.
    """
    packs = list(zip(load.pack_first.tolist(), load.pack_end.tolist(), strict=True))
    if not packs:
        return clock
    where, slack = grid(topology), costs.cluster.prefetch_layers
    clock = clock.copy()
    for a, b in packs:
        clock[a:b] += costs.cluster.round_seconds
    parts = dict(zip((layer.kind.letter for layer in costs.layers), load.layers, strict=True))
    at_parent = {costs.layers[i].kind.letter for i in costs.at_parent}
    alone = {letter: load.linear + part.seconds for letter, part in parts.items() if letter not in at_parent}
    full = {letter: _largest(packs, parts[letter]) for letter in at_parent}
    for letter in costs.model.kinds:
        if sync == "node":
            clock = np.maximum.reduceat(clock, where.node_starts)[where.node]
        elif slack == 0:
            clock = np.full_like(clock, clock.max())
        elif len(entered) >= slack:
            clock = np.maximum(clock, entered[-slack])
        entered.append(float(clock.max()))
        if letter in at_parent:
            clock = clock + load.linear
            for a, b in packs:
                clock[a:b] = clock[a:b].max() + full[letter][a:b]
        else:
            clock = clock + alone[letter]
    return clock


def _largest(packs: list[tuple[int, int]], layer: LayerLoad) -> np.ndarray:
    """Seconds of one layer at the parent, the same on all ranks of a pack."""
    spent = np.zeros(len(layer.compute))
    for a, b in packs:
        spent[a:b] = layer.compute[a:b].max() + (layer.exchange[a:b] + layer.latency[a:b]).max()
    return spent
