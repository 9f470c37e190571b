"""Everything a rank's layers need to know of one round, decided on the host before it runs.

A `Frame` is made from a layout alone: positions, attention calls and exchanges. Layers read it; they never compute
ranks, offsets or document borders themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from raypack.config import ModelConfig
from raypack.exchange.gathered.keys import GatherPlan, gathers, plan_gather
from raypack.exchange.halo.rows import HaloPlan, plan_halo
from raypack.exchange.heads.build import build_exchange
from raypack.exchange.heads.exchange import Exchange, Heads
from raypack.exchange.hsap.attention import HsapPlan, plan_hsap
from raypack.exchange.lasp2.states import StatePlan, plan_states
from raypack.exchange.layout import Layout, Segments
from raypack.kernels.packing import Packing
from raypack.layers.rope import RopeTable, rope_table
from raypack.plan.plan import Round
from raypack.plan.topology import Topology


@dataclass(frozen=True)
class Attend:
    """One layer kind's two exchanges and what its attention calls look like.

    Attributes:
        into: tokens -> heads, Q, K and V in one call.
        out: heads -> tokens (run in the `to_tokens` direction), query heads only.
        packings: documents of each call.
        kv_of_q: local KV head of each local query head, for each call.
        hsap: what the spread call does besides; None where no call is spread.
    """

    into: Exchange
    out: Exchange
    packings: tuple[Packing, ...]
    kv_of_q: tuple[tuple[int, ...], ...]
    hsap: HsapPlan | None


@dataclass(frozen=True)
class Gathered:
    """Documents of F layers whose K and V are gathered: who sends what, and the packed queries and keys of each block
    of `plan.blocks`."""

    plan: GatherPlan
    queries: tuple[Packing, ...]
    keys: tuple[Packing, ...]


@dataclass(frozen=True)
class Frame:
    """One round on one rank.

    Attributes:
        rows: tokens this rank holds.
        segments: which tokens they are; `samples` and `lengths` name the documents by `segments.placement`.
        full, sparse: attention of F and of S layers; `full` without the rows of `gathered`; `sparse` is None in
            models without S layers.
        gathered: kv_gather documents, where there are any around this rank.
        states, halo: linear attention and its convolution, in models with L layers (and `linear_conv`).
        recompute: none, selective or full; equal on all ranks.
    """

    rows: int
    segments: Segments
    samples: np.ndarray
    lengths: np.ndarray
    full: Attend
    sparse: Attend | None
    gathered: Gathered | None
    states: StatePlan | None
    halo: HaloPlan | None
    recompute: str
    _tables: dict[tuple[torch.device, torch.dtype], RopeTable] = field(default_factory=dict, repr=False, compare=False)

    def rope(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> RopeTable:
        """Rotation angles of this rank's rows, from their positions in their documents; made once a round."""
        key = (device, dtype)
        if key not in self._tables:
            positions = torch.from_numpy(self.segments.positions).to(device, non_blocking=True)
            self._tables[key] = rope_table(positions, config.head_dim, config.rope_base, dtype)
        return self._tables[key]


def build_frame(round_: Round, topology: Topology, rank: int, model: ModelConfig) -> Frame:
    """The frame of `rank`: a pure function of the round."""
    layout = Layout(round_, topology, rank)
    gathered = _gathered(layout, rank)
    exchanged = layout if gathered is None else layout.keeping(lambda run: not gathers(run))
    full = _attend(exchanged, rank, model, full=True)
    sparse = None
    if "S" in model.kinds:
        sparse = full if _alike(layout) else _attend(layout, rank, model, full=False)
    segments, linear = layout.segments(rank), "L" in model.kinds
    return Frame(
        rows=layout.rows(rank),
        segments=segments,
        samples=layout.columns["sample"],
        lengths=layout.columns["length"],
        full=full,
        sparse=sparse,
        gathered=gathered,
        states=plan_states(layout, rank, segments) if linear else None,
        halo=plan_halo(layout, rank, segments, model.linear_conv) if linear and model.linear_conv else None,
        recompute=round_.recompute,
    )


def _alike(layout: Layout) -> bool:
    """Whether S layers need nothing else than F layers: whole heads of every sample, exchanged over the same ranks.

    A plan without repacking then pays for one set of exchanges. Only attention by heads is known to be fit for that:
    gathered keys leave F's exchange out, and hsap brings a rank its node's tokens in place of the sample's.
    """
    return all(run.parent == run.child and run.attention == "ulysses" for run in layout.runs)


def _gathered(layout: Layout, rank: int) -> Gathered | None:
    plan = plan_gather(layout, rank)
    if plan is None:
        return None
    queries, keys = ([Packing(getattr(b, name)) for b in plan.blocks] for name in ("queries", "keys"))
    return Gathered(plan, tuple(queries), tuple(keys))


def _attend(layout: Layout, rank: int, model: ModelConfig, *, full: bool) -> Attend:
    into = build_exchange(layout, rank, Heads(model.heads, model.kv_heads), full=full)
    out = build_exchange(layout, rank, Heads(model.heads, model.kv_heads, kv_travels=False), full=full)
    per_kv = model.heads // model.kv_heads
    return Attend(
        into=into,
        out=out,
        packings=tuple(Packing(call.lengths) for call in into.calls),
        kv_of_q=tuple(call.kv_of_q(per_kv) for call in into.calls),
        hsap=plan_hsap(layout, rank, into) if full else None,
    )
