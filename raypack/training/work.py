"""A rank's work of one step: its plan turned into frames and token tensors, on the host, a step ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from raypack.config import ModelConfig
from raypack.data.loader import NO_LABEL
from raypack.layers.frame import Frame, build_frame
from raypack.plan.plan import Plan
from raypack.plan.topology import Topology

#: (sample ids, sample lengths, lows, highs), one entry a segment -> (tokens, labels), int64, one entry a row
RowLoader = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class RoundWork:
    """One round on one rank: tokens and labels are int64 [frame.rows], labels -100 where there is none."""

    frame: Frame
    tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class StepWork:
    """`labels` = how many this rank's rows carry, in all rounds."""

    plan: Plan
    rounds: tuple[RoundWork, ...]
    labels: int

    @property
    def rank_tokens(self) -> int:
        return sum(r.frame.rows for r in self.rounds)


def prepare(plan: Plan, topology: Topology, rank: int, model: ModelConfig, load: RowLoader) -> StepWork:
    """Frames and tokens of `rank` for every round of the plan.

    Positions, labels and document borders come from the layout's segments and from nowhere else.
    """
    rounds, held = [], 0
    for each in plan.rounds:
        frame = build_frame(each, topology, rank, model)
        s = frame.segments
        tokens, labels = load(frame.samples[s.placement], frame.lengths[s.placement], s.low, s.high)
        held += int(np.count_nonzero(labels != NO_LABEL))
        rounds.append(RoundWork(frame, torch.from_numpy(tokens), torch.from_numpy(labels)))
    return StepWork(plan, tuple(rounds), held)
