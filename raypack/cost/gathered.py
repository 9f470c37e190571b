"""What a gather asks of every rank of a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.cost.costs import Costs
from raypack.plan.grid import Grid


@dataclass(frozen=True)
class Gathered:
    """What gathers ask of every rank: float64 [world], one layer, all passes of a step.

    Attributes:
        pairs: query-key pairs over all heads, one pass.
        held: tokens x heads in memory.
        seconds, latency: of the collectives: bytes, and the rest.
        intra, inter: bytes sent (int64).
    """

    pairs: np.ndarray
    held: np.ndarray
    seconds: np.ndarray
    latency: np.ndarray
    intra: np.ndarray
    inter: np.ndarray

    @classmethod
    def nothing(cls, world: int) -> Gathered:
        zero, none = np.zeros(world), np.zeros(world, dtype=np.int64)
        return cls(zero.copy(), zero.copy(), zero.copy(), zero.copy(), none.copy(), none.copy())

    def send(self, ranks: slice, size: int, calls: int, where: Grid, costs: Costs) -> None:
        """Every rank of a block sends `size` bytes to each other one, in `calls` collectives."""
        near = np.minimum(where.node_end[ranks], ranks.stop) - np.maximum(where.node_first[ranks], ranks.start)
        intra, inter = size * (near - 1), size * (ranks.stop - ranks.start - near)
        self.intra[ranks] += intra
        self.inter[ranks] += inter
        self.seconds[ranks] += np.maximum(intra / costs.cluster.intra_rate, inter / costs.cluster.inter_rate)
        self.latency[ranks] += calls * costs.latency(
            crosses=bool(where.node[ranks.start] != where.node[ranks.stop - 1])
        )
