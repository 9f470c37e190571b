"""A policy of one's own: longest sample first, each on the block that is done with it soonest.

raypack plan --lengths step.txt --policy policy:soonest          # from this directory, or with it on PYTHONPATH
raypack train --plan.policy policy:soonest

A policy gets a `Problem` (samples, longest first; topology; costs; the cap) and answers with round, parent and child of
every sample. raypack refuses a plan that is illegal or over the cap; whether it is a quick one is the policy's affair:
`problem.judge(table)` has the seconds of any answer that it considers.
"""

from __future__ import annotations

import numpy as np

from raypack.plan.table import Table
from raypack.plan.topology import Block
from raypack.planning.problem import Problem


class Load:
    """What the ranks of one round have so far: seconds and tokens."""

    def __init__(self, world: int) -> None:
        self.seconds, self.tokens = np.zeros(world), np.zeros(world)


def soonest(problem: Problem) -> Table:
    """Parent = child: every sample has one width for all layers."""
    shapes = problem.equal_shapes  # one a legal width
    seconds, tokens = shapes.seconds(problem.lengths), shapes.need(problem.lengths)  # of a rank: [samples, widths]
    rounds = [Load(problem.topology.world)]
    chosen: list[tuple[int, Block]] = []
    for sample in range(len(problem.lengths)):
        options = [
            (rounds[-1].seconds[ranks].max() + seconds[sample, i], block, i)
            for i, width in enumerate(shapes.parent.tolist())
            for block in problem.topology.blocks_of_width(width)
            for ranks in [slice(block.first, block.end)]
            if rounds[-1].tokens[ranks].max() + tokens[sample, i] <= problem.cap
        ]
        if not options:  # the round is full: another one, which the sample begins on all ranks
            rounds.append(Load(problem.topology.world))
            options = [(0.0, Block(0, problem.topology.world), len(shapes) - 1)]
        _, block, i = min(options)
        rounds[-1].seconds[block.first : block.end] += seconds[sample, i]
        rounds[-1].tokens[block.first : block.end] += tokens[sample, i]
        chosen.append((len(rounds) - 1, block))
    number = np.array([round_ for round_, _ in chosen])
    first, width = np.array([block for _, block in chosen]).T
    return problem.table(number, first, width, first, width)
