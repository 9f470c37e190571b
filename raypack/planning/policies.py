"""`make_plan`: the five policies, each at least as good as the ones before it."""

from __future__ import annotations

import numpy as np

from raypack.config import ClusterConfig, ModelConfig
from raypack.errors import RaypackError
from raypack.parallel.topology import Topology
from raypack.planning.attention import gather_where_cheaper
from raypack.planning.children import repack_table
from raypack.planning.cost import ITEMSIZE, Costs
from raypack.planning.evaluate import check_cap, load_rounds
from raypack.planning.joint import joint_table
from raypack.planning.parents import repack_parents_table
from raypack.planning.plan import POLICIES, RECOMPUTES, Plan, check_plan
from raypack.planning.problem import Problem
from raypack.planning.spreading import check_even, spread_everywhere, spread_where_cheaper
from raypack.planning.table import Samples, Table, table_of
from raypack.planning.uniform import dynamic_table, static_table

CHOICES = ("ulysses", "kv_gather", "hsap", "auto")
DEFAULT_BUDGET = 10_000
"""Evaluations of local search where nothing else is said (`plan.budget` of a run)."""


def make_plan(
    samples: Samples,
    topology: Topology,
    cluster: ClusterConfig,
    model: ModelConfig,
    policy: str,
    *,
    step: int = 0,
    budget: int = DEFAULT_BUDGET,
    longest: int = 0,
    recompute: str = "none",
    itemsize: int = ITEMSIZE,
    attention: str = "ulysses",
) -> Plan:
    """Plan one step. Pure: the same plan for the same samples in any order, on any machine.

    Args:
        samples: documents of the step (`Samples`: ids, lengths, labels).
        topology: ranks and nodes to plan for; rates, cap and sync come from `cluster`.
        policy: static, dynamic, repack, repack+parents or joint.
        budget: evaluations of local search; 0 = plain greedy.
        longest: longest sample that the run allows, tokens: fixes the width of `static`; 0 = longest of the step.
        recompute: of every round.
        itemsize: bytes of one exchanged number.
        attention: of full layers: ulysses; kv_gather (then parent = child, so policies beyond `dynamic` give its plan);
            hsap for all parents over nodes, in rounds that keep the cap so; auto, kv_gather or hsap where it is cheaper
            in the plan that ulysses gets.

    Raises:
        RaypackError: an unknown policy, recompute or attention, a negative budget, a sample that fits nowhere, hsap
            with nodes of unequal size.
    """
    if policy not in POLICIES:
        raise RaypackError(f"policy = {policy!r}: one of {', '.join(POLICIES)}")
    if recompute not in RECOMPUTES:
        raise RaypackError(f"recompute = {recompute!r}: one of {', '.join(RECOMPUTES)}")
    if budget < 0:
        raise RaypackError(f"budget = {budget}: must be 0 (plain greedy) or more evaluations")
    if attention not in CHOICES:
        raise RaypackError(f"attention = {attention!r}: one of {', '.join(CHOICES)}")
    if attention == "hsap":
        check_even(topology)
    costs, forced = Costs(model, cluster, itemsize), "kv_gather" if attention == "kv_gather" else "ulysses"
    problem = Problem(samples.canonical(), topology, costs, cluster.sync, longest, recompute, budget, forced)
    problem.check_fits()
    table = best_table(problem, "dynamic" if forced != "ulysses" and policy != "static" else policy)
    if attention == "auto":
        table = spread_where_cheaper(problem, gather_where_cheaper(problem, table))
    elif attention == "hsap":
        table = spread_everywhere(problem, table)
    check_cap(load_rounds(table, topology, costs), costs)
    return table.to_plan(topology, policy, step)


def repack_plan(
    plan: Plan,
    cluster: ClusterConfig,
    model: ModelConfig,
    policy: str,
    *,
    budget: int = DEFAULT_BUDGET,
    itemsize: int = ITEMSIZE,
) -> Plan:
    """Repack the given packs of a plan made elsewhere, and never return anything slower.

    Args:
        policy: `repack` keeps every sample's parent and round and chooses its child; `repack+parents` also changes who
            shares which of the plan's packs.

    Raises:
        RaypackError: another policy, an illegal plan, rounds that differ in `recompute`, another attention than
            ulysses, a plan over the cap.
    """
    if policy not in ("repack", "repack+parents"):
        raise RaypackError(f"policy = {policy!r}: given packs take repack or repack+parents; make_plan takes all")
    check_plan(plan)
    if len({r.recompute for r in plan.rounds}) > 1 or any(p.attention != "ulysses" for p in plan.placements):
        raise RaypackError("a plan to repack needs one recompute in all rounds and attention = 'ulysses' throughout")
    costs = Costs(model, cluster, itemsize)
    given = table_of(plan)
    problem = Problem(
        given.samples.canonical(), plan.topology, costs, cluster.sync, 0, plan.rounds[0].recompute, budget
    )
    base = given.canonical()
    check_cap(load_rounds(base, plan.topology, costs), costs)
    table = repack_table(problem, base)
    if policy == "repack+parents":
        table = repack_parents_table(problem, base, table)
    made = table.to_plan(plan.topology, policy)
    return made.at(plan.step, plan.before, plan.after)


def best_table(problem: Problem, policy: str) -> Table:
    """The plan of a policy as a table; each policy starts from, and may return, the one before it."""
    static = static_table(problem)
    if policy == "static":
        return static
    dynamic = _better(problem, dynamic_table(problem), static)
    if policy == "dynamic":
        return dynamic
    repacked = repack_table(problem, dynamic)
    if policy == "repack":
        return repacked
    parents = repack_parents_table(problem, dynamic, repacked)
    if policy == "repack+parents":
        return parents
    return joint_table(problem, [dynamic, repacked, parents])


def _better(problem: Problem, first: Table, second: Table) -> Table:
    values = np.array([problem.judge(first), problem.judge(second)])
    return (first, second)[int(values.argmin())]
