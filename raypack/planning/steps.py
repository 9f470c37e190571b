"""The steps of a run, planned one after the other: each from the stream state before it (docs/planning.md).

`StepPlanner` keeps no state that matters: a request brings the stream state before the step, so another one gives the
same answer. `driver.planner` is the Ray actor around it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from raypack.config import ClusterConfig, Config, load_cluster
from raypack.data.corpus import Corpus
from raypack.data.splits import holdout_samples, training_stream
from raypack.errors import RaypackError
from raypack.plan.plan import Plan, StreamState
from raypack.plan.samples import Samples
from raypack.plan.topology import Topology
from raypack.planning.evaluate import Evaluation, evaluate
from raypack.planning.policies import BASELINES, make_plans

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class PlannedStep:
    """A plan and what the planner says of it; crosses processes once a node.

    Attributes:
        plan_seconds: how long the planner took, baselines included.
        plan_step_seconds: of the plan, by the cost model.
        static_step_seconds, dynamic_step_seconds: of the baselines' plans for the same samples.
        bytes_static, bytes_dynamic: {site: {scope: bytes}} that these plans would send.
    """

    plan: Plan
    plan_seconds: float
    plan_step_seconds: float
    bound_ratio: float
    model_flops: float
    static_step_seconds: float
    dynamic_step_seconds: float
    bytes_static: dict[str, dict[str, int]]
    bytes_dynamic: dict[str, dict[str, int]]
    parent_widths: Mapping[int, int] = field(default_factory=dict)
    child_widths: Mapping[int, int] = field(default_factory=dict)


def plan_cluster(config: Config) -> ClusterConfig:
    """The cluster the cost model uses in a run: preset or file, with the run file's overrides."""
    overrides: dict[str, Any] = {}
    if config.plan.sync:
        overrides["sync"] = config.plan.sync
    if config.plan.rank_tokens_max:
        overrides["rank_tokens_max"] = config.plan.rank_tokens_max
    return load_cluster(config.plan.cluster, overrides)


class StepPlanner:
    """Plans steps of a run. Pure but for the time it takes.

    Args:
        config: the run.
        corpus: its documents; only lengths and label counts are read.
    """

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.config = config
        self.cluster = plan_cluster(config)
        self.stream = training_stream(corpus, config.data)
        self.held_out = holdout_samples(corpus, config.data)
        self.itemsize = ITEM_BYTES[config.train.dtype]

    def plan(self, topology: Topology, step: int, before: StreamState) -> PlannedStep:
        """The plan of `step`, whose samples follow from `before`.

        Raises:
            RaypackError: a stream state of another corpus, or a sample that fits nowhere.
        """
        taken = self.stream.step(before)
        started = time.perf_counter()
        policy = self.config.plan.policy
        plans = self._make(taken.samples, topology, policy, BASELINES)
        figures = {name: self._evaluate(plan) for name, plan in plans.items()}
        plan_seconds = time.perf_counter() - started
        plan, own = plans[policy].at(step, taken.before, taken.after), figures[policy]
        static, dynamic = (figures[name] for name in BASELINES)
        return PlannedStep(
            plan=plan,
            plan_seconds=plan_seconds,
            plan_step_seconds=own.seconds,
            bound_ratio=own.bound_ratio,
            model_flops=own.model_flops,
            static_step_seconds=static.seconds,
            dynamic_step_seconds=dynamic.seconds,
            bytes_static=static.bytes,
            bytes_dynamic=dynamic.bytes,
            parent_widths=dict(sorted(Counter(p.parent.width for p in plan.placements).items())),
            child_widths=dict(sorted(Counter(p.child.width for p in plan.placements).items())),
        )

    def check_longest(self, topology: Topology) -> Plan:
        """The plan of one sample of `data.max_sample_tokens`; raises RaypackError where it fits no block."""
        longest, policy = self.config.data.max_sample_tokens, self.config.plan.policy
        try:
            return self._make(Samples.of_lengths([longest]), topology, policy, budget=0)[policy]
        except RaypackError as error:
            raise RaypackError(f"data.max_sample_tokens = {longest}: {str(error).removeprefix('sample 0: ')}") from None

    def held_out_plan(self, topology: Topology) -> Plan | None:
        """One plan for the held-out samples; None where there are none."""
        policy = self.config.plan.policy
        return self._make(self.held_out, topology, policy)[policy] if self.held_out is not None else None

    def _make(
        self,
        samples: Samples,
        topology: Topology,
        policy: str,
        baselines: Collection[str] = (),
        budget: int | None = None,
    ) -> dict[str, Plan]:
        return make_plans(
            samples,
            topology,
            self.cluster,
            self.config.model,
            policy,
            baselines=baselines,
            budget=self.config.plan.budget if budget is None else budget,
            longest=self.config.data.max_sample_tokens,
            recompute=self.config.train.recompute,
            itemsize=self.itemsize,
            attention=self.config.plan.attention,
        )

    def _evaluate(self, plan: Plan) -> Evaluation:
        return evaluate(plan, self.cluster, self.config.model, itemsize=self.itemsize)
