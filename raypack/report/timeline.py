"""What every rank does when, for any plan: the data of the plan picture (pure).

The figures are those of `evaluate`: a rank's parts add up to its busy seconds, and the last part ends with the step.
Within a round a rank's exchanges come first, then its full attention, then everything else, each summed over layers;
with `sync = "step"` the cheap part starts together in a pack, with `layer` and `node` waiting collects at the
round's end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.config import ClusterConfig, ModelConfig
from raypack.cost.rates import ITEMSIZE
from raypack.layers.costs import Costs
from raypack.layers.full.kind import shares
from raypack.plan.names import ATTENTIONS
from raypack.plan.plan import Plan, check_plan
from raypack.plan.table import RoundTable, table_of
from raypack.plan.topology import Topology
from raypack.planning.clock import cheap_seconds, full_exchange_seconds, full_seconds, pack_seconds, round_ends
from raypack.planning.evaluate import check_cap
from raypack.planning.load import RoundLoad, load_rounds

EXCHANGE, FULL, CHEAP = range(3)
NO_SAMPLE = -1


@dataclass(frozen=True, eq=False)
class Timeline:
    """All that ranks do in one step; a rank waits whenever it has no part.

    Attributes:
        seconds: of the step.
        rank, kind, sample, length: int64 [parts]; kind = `EXCHANGE`, `FULL` or `CHEAP`; exchanges belong to no sample
            (`NO_SAMPLE`).
        start, duration: float64 [parts], seconds.
        round_ends: float64 [rounds, world]: when each rank is done with each round, its waiting included.
    """

    topology: Topology
    seconds: float
    rank: np.ndarray
    kind: np.ndarray
    sample: np.ndarray
    length: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    round_ends: np.ndarray


def timeline(
    plan: Plan, cluster: ClusterConfig, model: ModelConfig, sync: str | None = None, *, itemsize: int = ITEMSIZE
) -> Timeline:
    """The timeline of a plan; arguments and errors as `planning.evaluate.evaluate`."""
    check_plan(plan)
    topology, costs, table = plan.topology, Costs(model, cluster, itemsize), table_of(plan)
    loads = load_rounds(table, topology, costs)
    check_cap(loads, costs)
    sync = sync or cluster.sync
    ends = np.array(list(round_ends(loads, topology, costs, sync)))
    begins = np.vstack([np.zeros(topology.world), ends[:-1]])
    parts = [
        _round_parts(table.in_round(number), load, begins[number], topology, costs, sync)
        for number, load in enumerate(loads)
    ]
    rank, kind, row, start, duration = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    known = row >= 0
    return Timeline(
        topology=topology,
        seconds=float(ends.max()),
        rank=rank,
        kind=kind,
        sample=np.where(known, table.samples.ids[row], NO_SAMPLE),
        length=np.where(known, table.samples.lengths[row], 0),
        start=start,
        duration=duration,
        round_ends=ends,
    )


Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""rank, kind, row of the table (or `NO_SAMPLE`), start, duration."""


def _round_parts(
    rows: RoundTable, load: RoundLoad, begin: np.ndarray, topology: Topology, costs: Costs, sync: str
) -> Parts:
    exchange = full_exchange_seconds(load, costs)
    for a, b in zip(load.pack_first.tolist(), load.pack_end.tolist(), strict=True):
        if sync == "step":
            begin = begin.copy()
            begin[a:b] = begin[a:b].max()
    full, cheap = full_seconds(load, costs), cheap_seconds(load, costs)
    full_start = begin + exchange
    cheap_start = full_start + full
    if sync == "step":
        packs = pack_seconds(load, costs)
        for a, b, t in zip(
            packs.first.tolist(), packs.end.tolist(), (packs.exchange + packs.full).tolist(), strict=True
        ):
            cheap_start[a:b] = begin[a:b] + t
    ranks = np.flatnonzero(exchange > 0)
    parts = [
        (ranks, np.full(len(ranks), EXCHANGE), np.full(len(ranks), NO_SAMPLE), begin[ranks], exchange[ranks]),
        _split(FULL, full, full_start, rows.row, *_full_weights(rows, costs)),
        _split(CHEAP, cheap, cheap_start, rows.row, *_cheap_weights(rows)),
    ]
    rank, kind, row, start, duration = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return rank, kind, row, start, duration


def _full_weights(rows: RoundTable, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries (placement, rank, weight): a sample's pairs x the rank's head share, on each rank of its parent."""
    index, rank, offset = _entries(rows.parent_first, rows.parent_width)
    weight = np.zeros(len(index))
    for key in np.unique(np.stack([rows.attention, rows.parent_width]), axis=1).T.tolist():
        mine = ((rows.attention == key[0]) & (rows.parent_width == key[1]))[index]
        share = shares(costs, ATTENTIONS[key[0]], key[1])[offset[mine]]
        for i in costs.at_parent:
            # A rank without heads still launches a kernel: its seconds go to its samples by their pairs.
            weight[mine] += costs.layers[i].count * costs.layers[i].pairs(rows.length)[index[mine]] * (share + 1e-9)
    return index, rank, weight


def _cheap_weights(rows: RoundTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries (placement, rank, weight): a sample's tokens / the child's width, on each rank of its child."""
    index, rank, _ = _entries(rows.child_first, rows.child_width)
    return index, rank, (rows.length / rows.child_width)[index]


def _entries(first: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One entry for each rank of each block: block index, rank, index in the block."""
    index = np.repeat(np.arange(len(first)), width)
    offset = np.arange(len(index)) - (np.cumsum(width) - width)[index]
    return index, first[index] + offset, offset


def _split(
    kind: int,
    seconds: np.ndarray,
    start: np.ndarray,
    row: np.ndarray,
    index: np.ndarray,
    rank: np.ndarray,
    weight: np.ndarray,
) -> Parts:
    """Share each rank's seconds among its placements by weight, one after another in canonical order."""
    order = np.lexsort((index, rank))
    index, rank, weight = index[order], rank[order], weight[order]
    total = np.bincount(rank, weight, len(seconds))
    duration = weight * (seconds[rank] / np.where(total[rank] > 0, total[rank], 1.0))
    before = np.cumsum(duration) - duration
    opening = np.concatenate(([0], np.flatnonzero(np.diff(rank)) + 1)) if len(rank) else index
    before -= np.repeat(before[opening], np.diff(np.append(opening, len(rank))))
    keep = duration > 0
    at = start[rank] + before
    return rank[keep], np.full(int(keep.sum()), kind), row[index[keep]], at[keep], duration[keep]
