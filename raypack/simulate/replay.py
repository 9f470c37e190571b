"""Replay: plan and cost every step of a trace under every policy (pure but for the stopwatch)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from raypack.config import ClusterConfig, ModelConfig
from raypack.errors import RaypackError
from raypack.layers.costs import Costs
from raypack.plan.names import POLICIES
from raypack.plan.plan import Plan
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.evaluate import Evaluation, evaluate
from raypack.planning.policies import DEFAULT_BUDGET, find_policy, make_plan
from raypack.planning.problem import Problem
from raypack.simulate.trace import Trace


@dataclass(frozen=True)
class Drawn:
    """What one step holds: a count, and tokens."""

    samples: int
    tokens: int
    longest: int


@dataclass(frozen=True, eq=False)
class Planned:
    """One step under one policy.

    Attributes:
        wide: whether some parent spans nodes.
        plan_seconds: wall clock of `make_plan` on this machine.
        plan: kept only where asked for: those of a long run would fill the memory.
    """

    figures: Evaluation
    wide: bool
    plan_seconds: float
    plan: Plan | None


@dataclass(frozen=True, eq=False)
class Replay:
    """What each step of a simulation holds; by policy, in the order asked for, one `Planned` a step."""

    trace: Trace
    topology: Topology
    cluster: ClusterConfig
    model: ModelConfig
    budget: int
    drawn: tuple[Drawn, ...]
    planned: dict[str, tuple[Planned, ...]]

    @property
    def steps(self) -> int:
        return len(self.drawn)


def replay(
    trace: Trace,
    topology: Topology,
    cluster: ClusterConfig,
    model: ModelConfig,
    policies: Sequence[str],
    steps: int,
    *,
    budget: int = DEFAULT_BUDGET,
    keep: Collection[int] = (),
    progress: Callable[[], None] = lambda: None,
) -> Replay:
    """Plan `steps` steps of the trace under each policy.

    Args:
        policies: distinct names, as `make_plan` takes them.
        budget: evaluations of local search a step.
        keep: steps whose plans the result holds.
        progress: called after each plan, `steps x policies` times.

    Raises:
        RaypackError: an unknown or repeated policy, none at all, steps below 1, or a document of the trace (drawn or
            not) that fits nowhere.
    """
    if steps < 1:
        raise RaypackError(f"steps = {steps}: must be at least 1")
    check_policies(policies)
    check_longest(trace, topology, cluster, model)
    planned: dict[str, list[Planned]] = {policy: [] for policy in policies}
    drawn = []
    for step, samples in enumerate(trace.steps(steps)):
        drawn.append(Drawn(len(samples.ids), int(samples.lengths.sum()), int(samples.lengths.max())))
        for policy in policies:
            started = time.perf_counter()
            plan = make_plan(samples, topology, cluster, model, policy, step=step, budget=budget, longest=trace.longest)
            seconds = time.perf_counter() - started
            figures, wide = evaluate(plan, cluster, model), spans_nodes(plan)
            planned[policy].append(Planned(figures, wide, seconds, plan if step in keep else None))
            progress()
    results = {policy: tuple(each) for policy, each in planned.items()}
    return Replay(trace, topology, cluster, model, budget, tuple(drawn), results)


def spans_nodes(plan: Plan) -> bool:
    """Whether some parent is wider than its node."""
    return any(not plan.topology.in_one_node(p.parent) for p in plan.placements)


def check_policies(policies: Sequence[str]) -> None:
    """Raises RaypackError for no policy, an unknown or a repeated one."""
    if not policies:
        raise RaypackError(f"policies: there is none; name some of {', '.join(POLICIES)}")
    for number, policy in enumerate(policies):
        find_policy(policy, "policies")
        if policy in policies[:number]:
            raise RaypackError(f"policies: {policy!r} occurs twice; name each once")


def check_longest(trace: Trace, topology: Topology, cluster: ClusterConfig, model: ModelConfig) -> None:
    """Raises RaypackError where the longest document of the trace fits no block, whether a step draws it or not."""
    lengths = trace.stream.samples.lengths
    at = int(lengths.argmax())
    longest = Samples(trace.stream.samples.ids[at : at + 1], lengths[at : at + 1], lengths[at : at + 1] - 1)
    problem = Problem(longest, topology, Costs(model, cluster), cluster.sync, trace.longest, "none", 0)
    try:
        problem.check_fits()
    except RaypackError as error:
        raise RaypackError(f"{error}; here --clip TOKENS shortens samples") from None


def seconds_of(planned: Sequence[Planned]) -> np.ndarray:
    """Step seconds, float64 [steps]."""
    return np.array([each.figures.seconds for each in planned])
