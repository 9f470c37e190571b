"""Everything a rank's layers need to know of one round, decided on the host before it runs.

A `Frame` is made from a layout alone: positions, and for each layer kind of the model what its host plan says. Layers
read it; they never compute ranks, offsets or document borders themselves. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from raypack.config import ModelConfig
from raypack.exchange.heads.plan import ByHeads, plan_heads
from raypack.exchange.layout import Layout, Segments
from raypack.kernels.packing import Kept
from raypack.layers.kinds import host_plan_of, kinds_of
from raypack.plan.plan import Round
from raypack.plan.topology import Topology


@dataclass(frozen=True)
class Around:
    """What a host plan is made from: the part of a round that a rank can meet."""

    layout: Layout
    rank: int
    model: ModelConfig
    kept: Kept = field(default_factory=Kept)

    @cached_property
    def segments(self) -> Segments:
        """The tokens that the rank holds."""
        return self.layout.segments(self.rank)

    def by_heads(self, *, full: bool) -> ByHeads:
        """Attention by heads over the samples' parents (`full`) or children; made once, whoever asks."""
        return self.kept.keep(full, lambda: plan_heads(self.layout, self.rank, self.model, full=full))


@dataclass(frozen=True)
class Frame:
    """One round on one rank.

    Attributes:
        rows: tokens this rank holds.
        segments: which tokens they are; `samples` and `lengths` name the documents by `segments.placement`.
        plans: what each layer kind's host plan says, by letter.
        recompute: none, selective or full; equal on all ranks.
        kept: what layers make on first use and share, such as angles of positions.
    """

    rows: int
    segments: Segments
    samples: np.ndarray
    lengths: np.ndarray
    plans: dict[str, Any]
    recompute: str
    kept: Kept = field(default_factory=Kept, repr=False, compare=False)


def build_frame(round_: Round, topology: Topology, rank: int, model: ModelConfig) -> Frame:
    """The frame of `rank`: a pure function of the round."""
    layout = Layout(round_, topology, rank)
    around = Around(layout, rank, model)
    return Frame(
        rows=layout.rows(rank),
        segments=around.segments,
        samples=layout.columns["sample"],
        lengths=layout.columns["length"],
        plans={kind.letter: host_plan_of(kind)(around) for kind in kinds_of(model)},
        recompute=round_.recompute,
    )
