"""`make_plan`: the five policies, each at least as good as the ones before it, and those of other people.

A policy is a callable `(Problem) -> Table`. One from outside, `package.module:object`, is called with the same problem
as the shipped ones and its table is checked like theirs; whether it is any good is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np

from raypack.config import ClusterConfig, ModelConfig
from raypack.cost.rates import ITEMSIZE
from raypack.errors import RaypackError
from raypack.layers.costs import Costs
from raypack.plan.names import POLICIES, RECOMPUTES, AttentionChoice
from raypack.plan.plan import Plan, check_plan
from raypack.plan.samples import Samples
from raypack.plan.table import Table, table_of
from raypack.plan.topology import Topology
from raypack.planning.attention import check_even, gather_where_cheaper, spread_everywhere, spread_where_cheaper
from raypack.planning.evaluate import check_cap
from raypack.planning.joint import joint_table
from raypack.planning.load import load_rounds
from raypack.planning.problem import Problem
from raypack.planning.repack import repack_parents_table, repack_table
from raypack.planning.uniform import dynamic_table, static_table
from raypack.registry import blame, is_foreign, resolve

Policy = Callable[[Problem], Table]

CHOICES: tuple[str, ...] = get_args(AttentionChoice)
BASELINES = ("static", "dynamic")
"""What every table compares with: heads exchanged, parent = child, whatever `attention` allows the others."""
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
    **options: Any,
) -> Plan:
    """Plan one step. Pure: the same plan for the same samples in any order, on any machine.

    Arguments, options and errors as `make_plans`.
    """
    plans = make_plans(samples, topology, cluster, model, policy, baselines=(), **options)
    return replace(plans[policy], step=step)


def make_plans(
    samples: Samples,
    topology: Topology,
    cluster: ClusterConfig,
    model: ModelConfig,
    policy: str,
    *,
    baselines: Collection[str] = BASELINES,
    budget: int = DEFAULT_BUDGET,
    longest: int = 0,
    recompute: str = "none",
    itemsize: int = ITEMSIZE,
    attention: str = "ulysses",
) -> dict[str, Plan]:
    """The plan of `policy`, and those of the baselines for the same samples, by policy; each is made once.

    Args:
        samples: documents of the step (`Samples`: ids, lengths, labels).
        topology: ranks and nodes to plan for; rates, cap and sync come from `cluster`.
        policy: static, dynamic, repack, repack+parents, joint, or `package.module:object` of a `Policy`.
        baselines: some of `BASELINES`.
        budget: evaluations of local search; 0 = plain greedy.
        longest: longest sample that the run allows, tokens: fixes the width of `static`; 0 = longest of the step.
        recompute: of every round.
        itemsize: bytes of one exchanged number.
        attention: of full layers, for policies beyond the baselines: ulysses; kv_gather (then parent = child, and all
            shipped ones give one plan); hsap for all parents over nodes, in rounds that keep the cap so; auto,
            kv_gather or hsap where it is cheaper in the plan that ulysses gets.

    Raises:
        RaypackError: an unknown policy, recompute or attention, a negative budget, a sample that fits nowhere, hsap
            with nodes of unequal size, a foreign policy that fails or makes no legal plan of these samples.
    """
    choose = find_policy(policy)
    if recompute not in RECOMPUTES:
        raise RaypackError(f"recompute = {recompute!r}: one of {', '.join(RECOMPUTES)}")
    if budget < 0:
        raise RaypackError(f"budget = {budget}: must be 0 (plain greedy) or more evaluations")
    if attention not in CHOICES:
        raise RaypackError(f"attention = {attention!r}: one of {', '.join(CHOICES)}")
    if attention == "hsap":
        check_even(topology)
    heads = Problem(
        samples.canonical(), topology, Costs(model, cluster, itemsize), cluster.sync, longest, recompute, budget
    )
    own = replace(heads, attention="kv_gather") if attention == "kv_gather" and policy not in BASELINES else heads
    own.check_fits()
    tables: dict[str, Table] = {}
    shared = [*baselines, *([policy] if own is heads and not is_foreign(policy) else [])]
    if shared:
        tables = tables_up_to(heads, max(shared, key=POLICIES.index))
    if policy not in tables:
        tables[policy] = choose(own) if is_foreign(policy) else tables_up_to(own, "dynamic")["dynamic"]
    if policy not in BASELINES and attention == "auto":
        tables[policy] = spread_where_cheaper(heads, gather_where_cheaper(heads, tables[policy]))
    elif policy not in BASELINES and attention == "hsap":
        tables[policy] = spread_everywhere(heads, tables[policy])
    check_cap(load_rounds(tables[policy], topology, heads.costs), heads.costs)
    return {
        name: table.to_plan(topology, name) for name, table in tables.items() if name == policy or name in baselines
    }


def find_policy(name: str, what: str = "policy") -> Policy:
    """The policy of a name; `what` names it in errors.

    Raises:
        RaypackError: there is no such policy.
    """
    found: Policy = resolve(name, {policy: partial(best_table, policy=policy) for policy in POLICIES}, what)
    return partial(_foreign_table, name=name, choose=found) if is_foreign(name) else found


def _foreign_table(problem: Problem, name: str, choose: Policy) -> Table:
    """What `choose` makes of the problem, in the planner's order of samples, once it is known to be a legal plan."""
    try:
        table = choose(problem)
        if not isinstance(table, Table):
            raise RaypackError(f"policy = {name!r}: must return a raypack.plan.table.Table, and returned {table!r:.80}")
        table = table.canonical()
        asked, given = problem.samples, table.samples
        if not all(np.array_equal(getattr(asked, part), getattr(given, part)) for part in ("ids", "lengths", "labels")):
            raise RaypackError(f"policy = {name!r}: its table has other samples than it was given")
        if set(table.round.tolist()) != set(range(table.rounds)):
            raise RaypackError(
                f"policy = {name!r}: must have samples in each of its {table.rounds} rounds, and no other"
            )
        check_plan(table.to_plan(problem.topology, name))
    except RaypackError:
        raise
    except Exception as error:
        raise blame(name, "policy", error) from error
    return table


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


def tables_up_to(problem: Problem, policy: str) -> dict[str, Table]:
    """The plan of `policy` and of those before it, as tables; each starts from, and may return, the one before it."""
    made = {"static": static_table(problem)}
    if policy == "static":
        return made
    dynamic = made["dynamic"] = _better(problem, dynamic_table(problem), made["static"])
    if policy == "dynamic":
        return made
    repacked = made["repack"] = repack_table(problem, dynamic)
    if policy == "repack":
        return made
    parents = made["repack+parents"] = repack_parents_table(problem, dynamic, repacked)
    if policy == "joint":
        made["joint"] = joint_table(problem, [dynamic, repacked, parents])
    return made


def best_table(problem: Problem, policy: str) -> Table:
    """The plan of a policy as a table."""
    return tables_up_to(problem, policy)[policy]


def _better(problem: Problem, first: Table, second: Table) -> Table:
    values = np.array([problem.judge(first), problem.judge(second)])
    return (first, second)[int(values.argmin())]
