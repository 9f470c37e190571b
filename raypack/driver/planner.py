"""The planner actor plans each step ahead of the workers and hands out references (docs/planning.md)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.errors import RaypackError
from raypack.plan.plan import Plan, StreamState
from raypack.plan.topology import Topology
from raypack.planning.steps import PlannedStep, StepPlanner

# Planning is a step ahead of the workers, and on a small machine beside them: they go first.
NICE = 19
ASK_AGAIN = 3


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


class PlanSource:
    """A worker's way to the planner actor's plans (`training.feed.Plans`).

    A plan lives in the planner's process until a node has pulled it. A planner that died meanwhile comes back and makes
    the same plan again, so it is asked again, `ASK_AGAIN` times.
    """

    def __init__(self, actor: Any, attempt: int, topology: Topology, timeout: float) -> None:
        self._actor, self._attempt, self._nodes, self._timeout = actor, attempt, topology.nodes, timeout

    def step(self, step: int, before: StreamState) -> PlannedStep:
        """Raises RaypackError: the planner's reason, or that it did not answer in time."""
        planned: PlannedStep = self._get(
            lambda: self._actor.plan.remote(self._attempt, self._nodes, step, before), f"the plan of step {step}"
        )
        return planned

    def held_out(self) -> Plan | None:
        plan: Plan | None = self._get(
            lambda: self._actor.held_out.remote(self._nodes), "the plan of the held-out samples"
        )
        return plan

    def _get(self, ask: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + self._timeout
        for left in range(ASK_AGAIN, -1, -1):
            try:
                (reference,) = ray.get(ask(), timeout=max(0.0, end - time.monotonic()))
                return ray.get(reference, timeout=max(0.0, end - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                raise RaypackError(
                    f"waited timeouts.plan = {self._timeout:g} s for {what} from the planner; is its node alive?"
                ) from None
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                text = str(cause) if isinstance(cause, RaypackError) else f"{type(cause).__name__}: {cause}"
                raise RaypackError(f"the planner could not make {what}: {text}") from None
            except ray.exceptions.RayError as error:
                if not left:
                    raise RaypackError(f"the planner is gone while {what} was asked for: {error}") from None
        raise AssertionError("unreachable")
