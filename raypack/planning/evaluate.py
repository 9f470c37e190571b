"""What a plan costs: seconds, bytes, waiting, MFU and the distance to its bounds, for any plan, own or foreign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypack.config import ClusterConfig, ModelConfig
from raypack.cost.rates import ITEMSIZE
from raypack.errors import RaypackError
from raypack.layers.costs import Costs, model_flops
from raypack.plan.names import PLANNED_SITES, RECOMPUTES, SYNCS, ULYSSES
from raypack.plan.plan import Plan, check_plan
from raypack.plan.table import Table, table_of
from raypack.plan.topology import Topology
from raypack.planning.bounds import bounds
from raypack.planning.clock import run_clock
from raypack.planning.load import RoundLoad, load_rounds
from raypack.planning.shapes import shapes


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The figures of one plan on one cluster.

    Attributes:
        sync: where ranks wait for each other.
        seconds: of the step; without the output head, which only `model_flops` and `mfu` count.
        bound_seconds, plain_bound_seconds: the area bound and the plain one.
        mfu: fraction of the peak, or None where seconds is 0.
        bytes: {site: {"intra": bytes, "inter": bytes}} sent by all ranks together, all passes and layers.
        rank_tokens_max: most tokens of one rank in one round.
        rounds: count.
        rank_busy, rank_waiting: float64 [ranks], seconds.
        rank_tokens: int64 [ranks], tokens of all rounds together.
        model_flops: forward and backward FLOPs, output head included.
    """

    policy: str
    sync: str
    ranks: int
    seconds: float
    bound_seconds: float
    plain_bound_seconds: float
    mfu: float
    bytes: dict[str, dict[str, int]]
    rank_tokens_max: int
    rounds: int
    rank_busy: np.ndarray
    rank_waiting: np.ndarray
    rank_tokens: np.ndarray
    model_flops: float

    @property
    def bound_ratio(self) -> float:
        """Seconds over the area bound: 1 is as good as can be."""
        return self.seconds / self.bound_seconds

    def bytes_of(self, scope: str) -> int:
        """Bytes of one scope (`intra` or `inter`), all sites together."""
        return sum(site[scope] for site in self.bytes.values())

    def to_data(self) -> dict[str, Any]:
        """The JSON object of `raypack evaluate` and `raypack plan`."""
        data = dict(vars(self))
        data["bound_ratio"] = self.bound_ratio
        for name in ("rank_busy", "rank_waiting", "rank_tokens"):
            data[name] = getattr(self, name).tolist()
        return data


def evaluate(
    plan: Plan, cluster: ClusterConfig, model: ModelConfig, sync: str | None = None, *, itemsize: int = ITEMSIZE
) -> Evaluation:
    """Cost a plan. The plan says how many ranks and nodes there are; `cluster` gives rates and the cap.

    Args:
        sync: `step`, `layer` or `node` in place of the cluster's.
        itemsize: bytes of one exchanged number.

    Raises:
        RaypackError: an illegal plan (`check_plan`), no placement at all, a rank over the cap, an unknown sync.
    """
    check_plan(plan)
    costs = Costs(model, cluster, itemsize)
    return evaluate_table(table_of(plan), plan.topology, costs, sync or cluster.sync, plan.policy)


def evaluate_table(table: Table, topology: Topology, costs: Costs, sync: str, policy: str) -> Evaluation:
    """As `evaluate`, for a plan in array form that is known to be legal but for the cap."""
    loads = load_rounds(table, topology, costs)
    check_cap(loads, costs)
    if sync not in SYNCS:
        raise RaypackError(f"sync = {sync!r}: one of step, layer, node")
    clock = run_clock(loads, topology, costs, sync)
    lengths = table.samples.lengths
    # The floor must hold for every round, so it takes the cheapest recompute of the plan, and the largest cap.
    recompute = min(table.recompute, key=RECOMPUTES.index)
    cap = max(costs.cap(how) for how in table.recompute)
    attention = "auto" if (table.attention != ULYSSES).any() else "ulysses"
    floor = bounds(shapes(topology, costs, recompute, attention), lengths, topology.world, cap)
    flops = model_flops(costs.model, lengths)
    return Evaluation(
        policy=policy,
        sync=sync,
        ranks=topology.world,
        seconds=clock.seconds,
        bound_seconds=floor.area,
        plain_bound_seconds=floor.plain,
        mfu=flops / (clock.seconds * topology.world * costs.cluster.peak_flops),
        bytes=sent_bytes(loads),
        rank_tokens_max=max(int(load.tokens.max()) for load in loads),
        rounds=table.rounds,
        rank_busy=clock.busy,
        rank_waiting=np.maximum(clock.seconds - clock.busy, 0.0),
        rank_tokens=np.sum([load.tokens for load in loads], axis=0),
        model_flops=flops,
    )


def sent_bytes(loads: Sequence[RoundLoad]) -> dict[str, dict[str, int]]:
    """{site: {scope: bytes}} of a step, every site that can occur in it."""
    total: dict[str, dict[str, int]] = {}
    each = [load.sent for load in loads]
    for site in PLANNED_SITES:
        parts = [sent[site] for sent in each if site in sent]
        if parts:
            total[site] = {
                scope: sum(int(part[i].sum()) for part in parts) for i, scope in enumerate(("intra", "inter"))
            }
    return total


def check_cap(loads: Sequence[RoundLoad], costs: Costs) -> None:
    """Raises RaypackError where a rank exceeds a memory limit in some round: names both, the value and the cap."""
    for number, load in enumerate(loads):
        cap = costs.cap(load.recompute)
        limits = [(load.tokens, "tokens")]
        for layer, part in zip(costs.layers, load.layers, strict=True):
            limits.append((part.held, f"tokens' worth of Q, K and V heads in a {layer.kind.name} layer"))
        for held, what in limits:
            rank = int(np.argmax(held))
            if held[rank] > cap * (1 + 1e-9):
                raise RaypackError(
                    f"round {number}: rank {rank} holds {held[rank]:.0f} {what}, over the cap of {cap}; "
                    "widen its samples, move some to another round or raise the cap (rank_tokens_max)"
                )
