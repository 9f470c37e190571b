"""The exact optimum of tiny planning problems by OR-Tools CP-SAT: the planner's oracle (tests and benchmarks).

The model is `evaluate`'s under sync = step, but for rounding to tokens (`search.exact` has the loads, a test compares
them): loads add up per round and rank, each of a layer's two exchanges takes the largest of its four sides
on a rank, a pack takes its largest full, cheap and exchange parts and starts when the last of its ranks is free. Times
are integers, scaled.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from raypack.plan.table import Table
from raypack.plan.topology import Block
from raypack.planning.problem import Problem
from raypack.planning.search.exact import CHEAP, FULL, FULL_IN, FULL_OUT, SPARSE_HELD, SPARSE_IN, SPARSE_OUT, Places

STEPS = 1_000_000
"""Integer steps of the area bound, and of the cap."""

Place = tuple[int, int, int]
"""(sample, round, place)."""


@dataclass(frozen=True)
class Optimum:
    """`seconds` of the best plan found, `floor` = proven lower bound, both as if tokens divided evenly."""

    seconds: float
    floor: float
    proven: bool
    table: Table


def even_seconds(problem: Problem, table: Table) -> float:
    """Seconds of a plan as if every sample's tokens divided evenly over its child (sync = step)."""
    places = Places(problem)
    plans = places.empty(table.rounds)
    for sample, (number, place) in enumerate(zip(table.round, places.of(table), strict=True)):
        plans = places.put(plans, sample, np.array([number]), np.array([place]))
    return float(places.price(plans).seconds[0])


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
        return Optimum(even_seconds(problem, hint), solver.best_objective_bound / oracle.scale, False, hint)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    chosen = np.array([place for place, variable in oracle.places.items() if solver.value(variable)])
    table = oracle.costed.table(chosen[:, 1], chosen[:, 2])
    floor, found = solver.best_objective_bound / oracle.scale, even_seconds(problem, table)
    if hint is not None and even_seconds(problem, hint) <= found:  # out of time before it had completed the hint
        table, found = hint, even_seconds(problem, hint)
    return Optimum(found, floor, status == cp_model.OPTIMAL, table)


class _Oracle:
    def __init__(self, problem: Problem, rounds: int) -> None:
        self.problem, self.rounds = problem, rounds
        self.model = cp_model.CpModel()
        self.costed = Places(problem)
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
        costed, mine = self.costed, []
        fits = self.problem.shapes.fits(self.problem.lengths[sample : sample + 1])[0]
        for place in np.flatnonzero(fits[costed.shape]).tolist():
            top, low = self.blocks[costed.parent[place]], self.blocks[costed.child[place]]
            for k in range(self.rounds):
                here = self.model.new_bool_var(f"{sample}.{k}.{place}")
                self.model.add_implication(here, self.parent[k, top])
                self.model.add_implication(here, self.child[k, low])
                self._add(k, costed.load[sample, place], here)
                self.places[sample, k, place] = here
                mine.append(here)
        self.model.add_exactly_one(mine)

    def _add(self, k: int, load: np.ndarray, here: Any) -> None:
        for row, rank in np.argwhere(load).tolist():
            unit = STEPS / self.problem.cap if row <= SPARSE_HELD else self.scale
            self.terms[k, row, rank].append((here, round(float(load[row, rank]) * unit)))

    def _sum(self, k: int, row: int, rank: int) -> Any:
        return sum(here * amount for here, amount in self.terms[k, row, rank])

    def _times(self) -> None:
        model, each = self.model, [(k, r) for k in range(self.rounds) for r in range(self.world)]
        full, cheap, exchange, start = (self._variables(name, each) for name in "fcxs")
        sides = {rows.start: self._largest(rows, each) for rows in (FULL_IN, FULL_OUT, SPARSE_IN, SPARSE_OUT)}
        ends: dict[tuple[int, int], Any] = {}
        for k, r in each:
            for row in range(SPARSE_HELD + 1):
                model.add(self._sum(k, row, r) <= STEPS + len(self.problem.lengths))
            model.add(full[k, r] >= self._sum(k, FULL, r) + self._launches(k, r, self.parent, full=True))
            narrow = sides[SPARSE_IN.start][k, r] + sides[SPARSE_OUT.start][k, r]
            narrow += self._sum(k, CHEAP, r) + self._launches(k, r, self.child, full=False)
            self._with_latency(k, r, cheap[k, r], narrow, self.child, full=False)
            wide = sides[FULL_IN.start][k, r] + sides[FULL_OUT.start][k, r]
            self._with_latency(k, r, exchange[k, r], wide, self.parent, full=True)
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
        spent = [sum(part[key] for part in sides.values()) for key in each]
        self._objective([ends[self.rounds - 1, r] for r in range(self.world)], spent)

    def _variables(self, name: str, each: list[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        return {key: self.model.new_int_var(0, 8 * STEPS, f"{name}{key}") for key in each}

    def _largest(self, rows: slice, each: list[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """Seconds of one exchange on every (round, rank): at least each of its sides."""
        found = self._variables(f"side{rows.start}.", each)
        for (k, r), variable in found.items():
            for row in range(rows.start, rows.stop):
                if self.terms[k, row, r]:
                    self.model.add(variable >= self._sum(k, row, r))
        return found

    def _launches(self, k: int, rank: int, used: dict[tuple[int, Block], Any], *, full: bool) -> Any:
        """Seconds of the attention calls of a rank: one a block in use, layer and pass."""
        costs = self.problem.costs
        kinds = [layer for layer in costs.layers if layer.kind.site and (layer.kind.at == "parent") == full]
        layers = sum(layer.count for layer in kinds)
        each = round(layers * self.problem.passes.exchange * costs.cluster.launch_seconds * self.scale)
        return sum(each * used[k, block] for block in self.blocks if block.holds(rank))

    def _with_latency(
        self, k: int, rank: int, variable: Any, load: Any, used: dict[tuple[int, Block], Any], *, full: bool
    ) -> None:
        """`variable` covers the rank's load, plus the latency of every block in use around the rank."""
        self.model.add(variable >= load)
        for block in self.blocks:
            if block.holds(rank) and block.width > 1:
                late = round(self._latency(block, full=full) * self.scale)
                self.model.add(variable >= load + late).only_enforce_if(used[k, block])

    def _latency(self, block: Block, *, full: bool) -> float:
        costs = self.problem.costs
        at_parent = 2 * sum(costs.layers[i].count for i in costs.at_parent)
        calls = at_parent if full else sum(each.count * each.kind.costing.calls(each) for each in costs.layers)
        return calls * self.problem.passes.exchange * costs.latency(not self.problem.topology.in_one_node(block))

    def _objective(self, ends: list[Any], spent: list[Any]) -> None:
        """`spent`: seconds of the exchanges of every round and rank."""
        makespan = self.model.new_int_var(int(STEPS * (1 - 1e-6)), 8 * STEPS, "makespan")
        # Redundant, but it gives the relaxation the work of every rank, and of all ranks together.
        own = [
            sum(self._sum(k, row, r) for k in range(self.rounds) for row in (FULL, CHEAP)) for r in range(self.world)
        ]
        for r in range(self.world):
            self.model.add(makespan >= ends[r])
            self.model.add(makespan >= own[r])
        self.model.add(self.world * makespan >= sum(own) + sum(spent))
        self.model.minimize(makespan)

    def hint(self, table: Table) -> None:
        chosen = set(zip(range(len(table.round)), table.round.tolist(), self.costed.of(table).tolist(), strict=True))
        for place, variable in self.places.items():
            self.model.add_hint(variable, place in chosen)
