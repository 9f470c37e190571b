"""One planning problem: the samples, the ranks, the costs, and how a candidate is judged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypack.cost.rates import PASSES, Passes
from raypack.errors import RaypackError
from raypack.layers.costs import Costs
from raypack.plan.names import ATTENTIONS, ULYSSES
from raypack.plan.samples import Samples
from raypack.plan.table import Table
from raypack.plan.topology import Topology
from raypack.planning.bounds import Bounds, bounds
from raypack.planning.clock import run_clock
from raypack.planning.load import RoundLoad, load_rounds
from raypack.planning.search.profiles import PairList, pair_list
from raypack.planning.shapes import Shapes, shapes


@dataclass(frozen=True, eq=False)
class Problem:
    """What every policy gets. `samples` are in canonical order (longest first).

    Attributes:
        longest: the longest sample the run allows, tokens: fixes the width of `static`.
        recompute: of every round.
        budget: evaluations of local search; 0 = plain greedy.
        attention: of all samples whose parent is wider than one rank.
    """

    samples: Samples
    topology: Topology
    costs: Costs
    sync: str
    longest: int
    recompute: str
    budget: int
    attention: str = "ulysses"

    @property
    def lengths(self) -> np.ndarray:
        return self.samples.lengths

    @cached_property
    def shapes(self) -> Shapes:
        """All parent and child widths; kv_gather has equal ones only."""
        return shapes(self.topology, self.costs, self.recompute, self.attention)

    @cached_property
    def equal_shapes(self) -> Shapes:
        """Parent = child, widths ascending."""
        return self.shapes.select(self.shapes.parent == self.shapes.child)

    @cached_property
    def bounds(self) -> Bounds:
        return bounds(self.shapes, self.lengths, self.topology.world)

    @property
    def passes(self) -> Passes:
        return PASSES[self.recompute]

    def pairs(self, shape: int) -> PairList:
        """The (parent, child) blocks of a shape (index into `shapes`)."""
        if shape not in self._pairs:
            widths = int(self.shapes.parent[shape]), int(self.shapes.child[shape])
            self._pairs[shape] = pair_list(self.topology, self.costs, self.recompute, *widths, self.attention)
        return self._pairs[shape]

    @cached_property
    def _pairs(self) -> dict[int, PairList]:
        return {}

    def used(self, lengths: np.ndarray) -> np.ndarray:
        """Rank-seconds that a sample keeps busy where others fill what its ranks leave free: [lengths, shapes]."""
        shapes = self.shapes
        full = shapes.full_seconds(lengths) + np.outer(lengths, shapes.full_exchange)
        return full * shapes.parent + shapes.cheap_seconds(lengths) * shapes.child

    @property
    def meets_in_packs(self) -> bool:
        """Whether rounds of different packs may overlap in time: ranks wait only inside their pack (or node)."""
        return self.sync != "layer"

    @property
    def lockstep(self) -> bool:
        """Whether every rank waits for every other in every layer."""
        return self.sync == "layer" and self.costs.cluster.prefetch_layers == 0

    @property
    def waits_in_layers(self) -> bool:
        """Whether ranks wait for each other in every layer, in the world or in their node."""
        return self.lockstep or self.sync == "node"

    @property
    def cap(self) -> int:
        return self.costs.cap(self.recompute)

    def table(
        self,
        round_: np.ndarray,
        parent_first: np.ndarray,
        parent_width: np.ndarray,
        child_first: np.ndarray,
        child_width: np.ndarray,
    ) -> Table:
        """A candidate from one entry per sample; empty rounds are dropped."""
        inside = (child_first >= parent_first) & (child_first + child_width <= parent_first + parent_width)
        assert inside.all(), "a child outside its parent"
        rounds = int(round_.max()) + 1
        attention = np.where(parent_width > 1, ATTENTIONS.index(self.attention), ULYSSES)
        columns = (round_, parent_first, parent_width, child_first, child_width)
        whole = Table(self.samples, *columns, attention, (self.recompute,) * rounds)
        return whole.without_empty_rounds()

    def judge(self, table: Table) -> float:
        """Seconds of a candidate; infinite where it exceeds a memory limit. Policies meet the same plans again."""
        key = table.digest
        if key not in self._judged:
            self._judged[key] = self._seconds(table)
        return self._judged[key]

    @cached_property
    def _judged(self) -> dict[bytes, float]:
        return {}

    def _seconds(self, table: Table) -> float:
        loads = load_rounds(table, self.topology, self.costs)
        if not all(map(self.keeps_cap, loads)):
            return float("inf")
        return run_clock(loads, self.topology, self.costs, self.sync).seconds

    def keeps_cap(self, load: RoundLoad) -> bool:
        """Whether a round keeps both memory limits on every rank."""
        return bool(max(load.tokens.max(), load.held.max()) <= self.cap * (1 + 1e-9))

    def check_fits(self) -> None:
        """Raises RaypackError for a sample that fits nowhere: names it, the cap, and what would do."""
        longest = self.lengths[:1]
        need = self.shapes.need(longest)[0]
        if need.min() <= self.cap:
            return
        width = -(-int(longest[0]) // self.cap)
        raise RaypackError(
            f"sample {self.samples.ids[0]}: length = {longest[0]} fits no block of {self.topology.world} ranks at the "
            f"cap of {self.cap} tokens a rank (rank_tokens_max); a cap of {int(np.ceil(need.min()))} would do, or "
            f"blocks of at least {width} ranks, or a shorter sample (data.max_sample_tokens)"
        )
