"""The planner actor: plans each step ahead of the workers and hands out references (docs/planning.md).

`StepPlanner` is plain and decides; `PlannerActor` is the thin Ray actor around it. It keeps no state that matters: a
request brings the stream state before the step, so a restarted actor, or another one, gives the same answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray

from raypack.config import ClusterConfig, Config, load_cluster
from raypack.data.corpus import Corpus
from raypack.data.splits import holdout_samples, training_stream
from raypack.errors import RaypackError
from raypack.parallel.topology import Topology
from raypack.planning.evaluate import Evaluation, evaluate
from raypack.planning.plan import Plan, StreamState
from raypack.planning.policies import BASELINES, make_plans
from raypack.planning.table import Samples

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
# Planning is a step ahead of the workers, and on a small machine beside them: they go first.
NICE = 19


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


class PlannerActor:
    """Answers `plan` requests of all ranks; plans `look_ahead` steps beyond the newest request meanwhile.

    Requests are keyed by (attempt, nodes, step); a new attempt discards what was planned for the old one.
    """

    def __init__(self, settings: dict[str, Any], corpus: str) -> None:
        os.nice(NICE)
        self._config = Config.model_validate(settings)
        self._planner = StepPlanner(self._config, Corpus.open(corpus))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._attempt = -1
        self._held_out: dict[tuple[int, ...], asyncio.Task[Any]] = {}
        self._tasks: dict[tuple[tuple[int, ...], int, StreamState], asyncio.Task[Any]] = {}

    async def ready(self) -> bool:
        return True

    async def plan(self, attempt: int, nodes: tuple[int, ...], step: int, before: StreamState) -> list[Any]:
        """[reference to the PlannedStep], so that a node pulls it once; raises RaypackError as `StepPlanner.plan`."""
        if attempt < self._attempt:
            raise RaypackError(f"attempt {attempt} asked for step {step} after attempt {self._attempt} had begun")
        if attempt > self._attempt:
            self._attempt = attempt
            for task in self._tasks.values():
                task.cancel()
            self._tasks.clear()
        nodes, before = tuple(nodes), StreamState(*before)
        reference, _ = await self._task(nodes, step, before, self._config.plan.look_ahead)
        for key in [k for k in self._tasks if k[1] < step - 1]:
            del self._tasks[key]
        return [reference]

    async def begun(self, attempt: int) -> bool:
        """Whether a worker of `attempt` has asked for a plan: they are up, and agree on code, settings and corpus."""
        return self._attempt >= attempt

    async def held_out(self, nodes: tuple[int, ...]) -> list[Any]:
        """[reference to the plan of the held-out samples, or to None]; made once for all ranks."""
        nodes = tuple(nodes)
        if nodes not in self._held_out:
            self._held_out[nodes] = asyncio.get_running_loop().create_task(self._make_held_out(nodes))
        return [await self._held_out[nodes]]

    async def _make_held_out(self, nodes: tuple[int, ...]) -> Any:
        loop = asyncio.get_running_loop()
        return ray.put(await loop.run_in_executor(self._thread, self._planner.held_out_plan, Topology(nodes)))

    def _task(self, nodes: tuple[int, ...], step: int, before: StreamState, ahead: int) -> asyncio.Task[Any]:
        key = (nodes, step, before)
        if key not in self._tasks:
            self._tasks[key] = asyncio.get_running_loop().create_task(self._make(nodes, step, before, ahead))
        elif ahead > 0 and self._tasks[key].done() and not self._tasks[key].exception():
            self._next(nodes, step, self._tasks[key].result()[1], ahead)
        return self._tasks[key]

    async def _make(
        self, nodes: tuple[int, ...], step: int, before: StreamState, ahead: int
    ) -> tuple[Any, StreamState]:
        loop = asyncio.get_running_loop()
        planned = await loop.run_in_executor(self._thread, self._planner.plan, Topology(nodes), step, before)
        after = planned.plan.after
        assert after is not None
        self._next(nodes, step, after, ahead)
        return ray.put(planned), after

    def _next(self, nodes: tuple[int, ...], step: int, after: StreamState, ahead: int) -> None:
        if ahead > 0 and step + 1 < self._config.run.steps:
            task = self._task(nodes, step + 1, after, ahead - 1)
            # Whoever asks for that step sees its error; nobody may ask.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


Planner = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=1024)(PlannerActor)  # type: ignore[call-overload]
