"""The exact optimum of tiny planning problems by OR-Tools CP-SAT: the planner's oracle (tests and benchmarks).

The model is the search's view of the cost (`planning.profiles`): loads add up per round and rank, a pack takes its
largest full, cheap and exchange parts, and starts when the last of its ranks is free. Times are integers, scaled.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from raypack.parallel.topology import Block
from raypack.planning.neighbours import finish
from raypack.planning.problem import Problem
from raypack.planning.profiles import CHEAP, EXCHANGE, FULL, SPARSE_HELD
from raypack.planning.state import State
from raypack.planning.table import Table

STEPS = 1_000_000
"""Integer steps of the area bound, and of the cap."""

Place = tuple[int, int, int, int]
"""(sample, round, shape, pair)."""


@dataclass(frozen=True)
class Optimum:
    """`seconds` of the best plan found, `floor` = proven lower bound, both in the search's view of the cost."""

    seconds: float
    floor: float
    proven: bool
    table: Table


def additive_seconds(problem: Problem, table: Table) -> float:
    """Seconds of a plan in the search's view of the cost (sync = step)."""
    return float(finish(State.of(problem, table, table.rounds)).max())


def solve(problem: Problem, rounds: int, seconds: float, hint: Table | None = None, workers: int = 2) -> Optimum:
    """Minimise the step over every (round, parent, child) of every sample; `hint` = a plan to start from."""
    oracle = _Oracle(problem, rounds)
    if hint is not None:
        oracle.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    status = solver.solve(oracle.model)
    if status == cp_model.UNKNOWN and hint is not None:  # out of time before it had even taken over the hint
        return Optimum(additive_seconds(problem, hint), solver.best_objective_bound / oracle.scale, False, hint)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    for place, variable in oracle.places.items():
        if solver.value(variable):
            oracle.state.put(place[0], place[1:])
    return Optimum(
        float(finish(oracle.state).max()),
        solver.best_objective_bound / oracle.scale,
        status == cp_model.OPTIMAL,
        oracle.state.table(),
    )


class _Oracle:
    def __init__(self, problem: Problem, rounds: int) -> None:
        self.problem, self.rounds = problem, rounds
        self.model = cp_model.CpModel()
        self.state = State(problem, rounds)
        self.scale = STEPS / problem.bounds.area
        self.world, self.blocks = problem.topology.world, problem.topology.blocks
        self.places: dict[Place, Any] = {}
        self.terms: dict[tuple[int, int, int], list[tuple[Any, int]]] = defaultdict(list)
        names = [(k, b) for k in range(rounds) for b in self.blocks]
        self.parent = {key: self.model.new_bool_var(f"parent{key}") for key in names}
        self.child = {key: self.model.new_bool_var(f"child{key}") for key in names}
        for sample in range(len(problem.lengths)):
            self._place(sample)
        self._times()

    def _place(self, sample: int) -> None:
        """One place for the sample; what it adds to every rank there."""
        problem, mine = self.problem, []
        fits = problem.shapes.fits(problem.lengths[sample : sample + 1])[0]
        for shape in np.flatnonzero(fits).tolist():
            pairs = problem.pairs(shape)
            for pair in range(len(pairs.child_first)):
                top = Block(int(pairs.parent_first[pair]), pairs.parent_width)
                low = Block(int(pairs.child_first[pair]), pairs.child_width)
                load = np.tensordot(self.state.amounts[sample], pairs.stack[pairs.profile[pair]], axes=1)
                for k in range(self.rounds):
                    here = self.model.new_bool_var(f"{sample}{k}{shape}{pair}")
                    self.model.add_implication(here, self.parent[k, top])
                    self.model.add_implication(here, self.child[k, low])
                    self._add(k, top.first, load, here)
                    self.places[sample, k, shape, pair] = here
                    mine.append(here)
        self.model.add_exactly_one(mine)

    def _add(self, k: int, first: int, load: np.ndarray, here: Any) -> None:
        for row in range(EXCHANGE.stop):
            unit = STEPS / self.problem.cap if row <= SPARSE_HELD else self.scale
            for at in np.flatnonzero(load[row]).tolist():
                self.terms[k, row, first + at].append((here, round(float(load[row, at]) * unit)))

    def _sum(self, k: int, row: int, rank: int) -> Any:
        return sum(here * amount for here, amount in self.terms[k, row, rank])

    def _times(self) -> None:
        model, horizon = self.model, 8 * STEPS
        each = [(k, r) for k in range(self.rounds) for r in range(self.world)]
        full, cheap, exchange, start = (
            {key: model.new_int_var(0, horizon, f"{name}{key}") for key in each} for name in "fcxs"
        )
        ends: dict[tuple[int, int], Any] = {}
        for k, r in each:
            for row in range(SPARSE_HELD + 1):
                model.add(self._sum(k, row, r) <= STEPS + len(self.problem.lengths))
            model.add(full[k, r] >= self._sum(k, FULL, r))
            self._with_latency(k, r, cheap[k, r], [CHEAP], self.child, full=False)
            self._with_latency(k, r, exchange[k, r], list(range(EXCHANGE.start, EXCHANGE.stop)), self.parent, full=True)
            busy = model.new_bool_var(f"busy{k}.{r}")
            for block in self.blocks:
                if block.holds(r):
                    model.add_implication(self.parent[k, block], busy)
            if k:
                model.add(start[k, r] >= ends[k - 1, r])
            fixed = round(self.problem.costs.cluster.round_seconds * self.scale)
            ends[k, r] = start[k, r] + full[k, r] + cheap[k, r] + exchange[k, r] + fixed * busy
        for (k, block), used in self.parent.items():
            for r in range(block.first, block.end - 1):
                for variables in (full, cheap, exchange, start):
                    model.add(variables[k, r] == variables[k, r + 1]).only_enforce_if(used)
        self._objective([ends[self.rounds - 1, r] for r in range(self.world)])

    def _with_latency(
        self, k: int, rank: int, variable: Any, rows: list[int], used: dict[tuple[int, Block], Any], *, full: bool
    ) -> None:
        """`variable` covers the rank's load in each row, plus the latency of every block in use around the rank."""
        for row in rows:
            load = self._sum(k, row, rank)
            self.model.add(variable >= load)
            for block in self.blocks:
                if block.holds(rank) and block.width > 1:
                    late = round(self._latency(block, full=full) * self.scale)
                    self.model.add(variable >= load + late).only_enforce_if(used[k, block])

    def _latency(self, block: Block, *, full: bool) -> float:
        costs = self.problem.costs
        layers = costs.full_layers if full else costs.sparse_layers
        crosses = not self.problem.topology.in_one_node(block)
        return 2 * layers * self.problem.passes.exchange * costs.latency(crosses)

    def _objective(self, ends: list[Any]) -> None:
        makespan = self.model.new_int_var(int(STEPS * (1 - 1e-6)), 8 * STEPS, "makespan")
        # Redundant, but it gives the relaxation the work of every rank, and of all ranks together.
        own = [
            sum(self._sum(k, row, r) for k in range(self.rounds) for row in (FULL, CHEAP)) for r in range(self.world)
        ]
        for r in range(self.world):
            self.model.add(makespan >= ends[r])
            self.model.add(makespan >= own[r])
        self.model.add(self.world * makespan >= sum(own))
        self.model.minimize(makespan)

    def hint(self, table: Table) -> None:
        chosen = {(sample, *place) for sample, place in enumerate(self.state.places(table))}
        for place, variable in self.places.items():
            self.model.add_hint(variable, place in chosen)
