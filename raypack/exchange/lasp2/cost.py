"""What the gather of states (LASP-2) asks of ranks: one slot a child width of the component, whatever its tokens."""

from __future__ import annotations

import numpy as np

from raypack.cost.rates import Rates
from raypack.exchange.asks import Ask
from raypack.exchange.cohorts import Shards
from raypack.plan.grid import grid
from raypack.plan.topology import Block, Topology

SITE = "state_gather"


def ask(shards: Shards, slot_bytes: int, calls: int, rates: Rates) -> Ask:
    """The states of one layer, all passes of a step.

    Args:
        slot_bytes: what one slot sends to each other rank in a step.
        calls: collectives of a step.
    """
    found = Ask.nothing(shards.world, SITE)
    first, width = shards.streams.child_first, shards.streams.child_width
    for ranks, _ in shards.streams.components(shards.where):
        inside = (first >= ranks.start) & (first < ranks.stop) & (width > 1)
        size = len(np.unique(width[inside])) * slot_bytes
        found.copy_to_all(SITE, ranks, size, calls, shards.where, rates)
    return found


def least_seconds(topology: Topology, slot_bytes: int, rates: Rates, child: Block) -> float:
    """Seconds of the bytes of one layer's states on the child's busiest rank: a wider component only sends more."""
    where = grid(topology)
    near = np.minimum(where.node_end, child.end) - np.maximum(where.node_first, child.first)
    near = near[child.first : child.end]
    intra, inter = slot_bytes * (near - 1), slot_bytes * (child.width - near)
    return float(np.maximum(intra / rates.cluster.intra_rate, inter / rates.cluster.inter_rate).max())
