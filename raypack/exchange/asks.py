"""What a way of exchanging asks of ranks, in the three forms in which a planner reads it.

- `Ask`: of every rank of a round, exact to the token (the judge).
- `Addition`: of every rank of a block, by one sample that lies evenly on its child (the search).
- `Floor`: of any plan around a sample, at least (the bounds).

Each way makes all three from the same coefficients: the heads that its ranks hold, and the bytes of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raypack.cost.rates import Rates
from raypack.plan.grid import Grid

Bytes = dict[str, tuple[np.ndarray, np.ndarray]]
"""{site: (sent inside a node, sent across)}, int64 [world] each."""


@dataclass(frozen=True)
class Ask:
    """What one layer asks of every rank in a round: float64 arrays [world].

    Attributes:
        pairs: query-key pairs times the share of the heads, of one pass.
        held: tokens x heads of Q, K and V in memory.
        calls: attention calls of one pass.
        inward, outward: heads x tokens of one pass of the exchanges in and out, [4, world]: sent inside a node, sent
            across, received inside, received across.
        seconds, latency: of other collectives, all passes of a step: bytes, and the rest.
        sent: bytes of other collectives, all passes.
    """

    pairs: np.ndarray
    held: np.ndarray
    calls: np.ndarray
    inward: np.ndarray
    outward: np.ndarray
    seconds: np.ndarray
    latency: np.ndarray
    sent: Bytes = field(default_factory=dict)

    @classmethod
    def nothing(cls, world: int, *sites: str) -> Ask:
        """Zeros to add to; `sites` of other collectives."""
        sides = np.zeros((4, world)), np.zeros((4, world))
        sent = {site: (np.zeros(world, dtype=np.int64), np.zeros(world, dtype=np.int64)) for site in sites}
        return cls(np.zeros(world), np.zeros(world), np.zeros(world), *sides, np.zeros(world), np.zeros(world), sent)

    def copy_to_all(self, site: str, ranks: slice, size: int, calls: int, where: Grid, rates: Rates) -> None:
        """Every rank of a block sends `size` bytes to each other one, in `calls` collectives: added in place."""
        near = np.minimum(where.node_end[ranks], ranks.stop) - np.maximum(where.node_first[ranks], ranks.start)
        intra, inter = size * (near - 1), size * (ranks.stop - ranks.start - near)
        self.sent[site][0][ranks] += intra
        self.sent[site][1][ranks] += inter
        self.seconds[ranks] += np.maximum(intra / rates.cluster.intra_rate, inter / rates.cluster.inter_rate)
        crosses = bool(where.node[ranks.start] != where.node[ranks.stop - 1])
        self.latency[ranks] += calls * rates.latency(crosses)

    def __add__(self, other: Ask) -> Ask:
        sent = dict(self.sent)
        for site, (intra, inter) in other.sent.items():
            before = sent.get(site, (0, 0))
            sent[site] = (before[0] + intra, before[1] + inter)
        return Ask(
            pairs=self.pairs + other.pairs,
            held=self.held + other.held,
            calls=self.calls + other.calls,
            inward=self.inward + other.inward,
            outward=self.outward + other.outward,
            seconds=self.seconds + other.seconds,
            latency=self.latency + other.latency,
            sent=sent,
        )


def exchange_seconds(sides: np.ndarray, rates: Rates) -> np.ndarray:
    """Seconds of one exchange on every rank, from heads x tokens [4, ranks] in the order of `Ask.inward`.

    The larger of its seconds inside the node and across, each the larger of sent and received over the rate.
    """
    out_intra, out_inter, in_intra, in_inter = sides * rates.head_bytes
    intra = np.maximum(out_intra, in_intra) / rates.cluster.intra_rate
    inter = np.maximum(out_inter, in_inter) / rates.cluster.inter_rate
    return np.maximum(intra, inter)


@dataclass(frozen=True)
class Addition:
    """What one token (and one query-key pair) of a sample adds to every rank of a block, in one pass of one layer.

    Attributes:
        share: part of the sample's pairs that the rank computes: float64 [width].
        held: heads of Q, K and V in memory: float64 [width].
        inward, outward: heads that the rank moves in the exchanges in and out, [4, width]: tokens' side and heads' side
            inside the node, then the same across (the order of `Rates.scope_rates`).
    """

    share: np.ndarray
    held: np.ndarray
    inward: np.ndarray
    outward: np.ndarray


@dataclass(frozen=True)
class Floor:
    """What a sample asks at the very least, whatever else a plan holds: of one layer, a pass.

    Attributes:
        share: part of the pairs on the busiest rank.
        held: heads of Q, K and V a token on the rank that holds most.
        even: seconds a token of the exchanges in and out on the busiest rank, where the sample lies evenly.
        anywhere: the same, wherever it lies in its child.
        slope: how fast `even` can fall with the largest share of a rank.
        intra, inter: seconds a token of the bytes that all ranks send together.
        calls: collectives that every rank waits for.
    """

    share: float
    held: float
    even: float = 0.0
    anywhere: float = 0.0
    slope: float = 0.0
    intra: float = 0.0
    inter: float = 0.0
    calls: int = 0
