"""Plans a step ahead: the feed of a rank and the planner actor's own logic, without Ray."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.driver import planner as planner_module
from raypack.driver.planner import PlannerActor
from raypack.errors import RaypackError
from raypack.plan.plan import StreamState
from raypack.plan.topology import Topology
from raypack.planning.steps import PlannedStep, StepPlanner
from raypack.training.feed import Feed
from tests.job_runs import TINY, tiny_corpus

NODES = (1, 1)
WAIT = 30.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_corpus(tmp_path_factory.mktemp("feed") / "corpus")


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({name: {**data, **sections.get(name, {})} for name, data in TINY.items()})


def step_planner(corpus: Path) -> StepPlanner:
    return StepPlanner(config(), Corpus.open(corpus))


class Source:
    """Hands out the planner's plans in this process; `before(step)` runs first in each request."""

    def __init__(self, corpus: Path, before: Any = lambda step: None) -> None:
        self.planner, self.before = step_planner(corpus), before
        self.asked: list[int] = []

    def step(self, step: int, before: StreamState) -> PlannedStep:
        self.asked.append(step)
        self.before(step)
        return self.planner.plan(Topology(NODES), step, before)


def work_of(plan: Any) -> Any:
    return SimpleNamespace(plan=plan)


def test_a_feed_gives_every_step_once_and_in_the_streams_order(corpus: Path) -> None:
    source = Source(corpus)
    start = source.planner.stream.start
    feed = Feed(source, work_of, 0, start, 5)  # type: ignore[arg-type]
    seen = [feed.next().work for _ in range(5)]
    feed.close()
    assert source.asked == [0, 1, 2, 3, 4]
    state = start
    for step, work in enumerate(seen):
        taken = source.planner.stream.step(state)
        assert work is not None
        assert work.plan.step == step
        assert (work.plan.before, work.plan.after) == (taken.before, taken.after)
        assert sorted(p.sample for p in work.plan.placements) == sorted(taken.samples.ids.tolist())
        state = taken.after


def test_the_next_plan_and_work_are_made_while_a_step_runs(corpus: Path) -> None:
    prepared = threading.Event()

    def slow(plan: Any) -> Any:
        if plan.step == 1:
            prepared.set()
        return work_of(plan)

    source = Source(corpus)
    feed = Feed(source, slow, 0, source.planner.stream.start, 3)  # type: ignore[arg-type]
    feed.next()
    assert prepared.wait(WAIT), "step 1 was not prepared while step 0 ran"
    assert source.asked == [0, 1]
    feed.close()


def test_a_fault_of_one_rank_is_handed_on_and_never_raised(corpus: Path) -> None:
    def refuse(step: int) -> None:
        if step == 1:
            raise RaypackError("the planner could not make the plan of step 1: no room")

    source = Source(corpus, refuse)
    feed = Feed(source, work_of, 0, source.planner.stream.start, 5)  # type: ignore[arg-type]
    assert feed.next().trouble is None
    fed = feed.next()
    assert (fed.work, fed.trouble) == (None, "the planner could not make the plan of step 1: no room")
    feed.close()

    def broken(plan: Any) -> Any:
        raise ZeroDivisionError("in a frame")

    feed = Feed(Source(corpus), broken, 0, source.planner.stream.start, 5)  # type: ignore[arg-type]
    fed = feed.next()
    assert (fed.work, fed.trouble) == (None, "ZeroDivisionError: in a frame")
    assert fed.planned is not None
    feed.close()


def test_only_the_wait_for_the_plan_counts_as_such(corpus: Path) -> None:
    release = threading.Event()
    source = Source(corpus, lambda step: release.wait(WAIT) if step == 0 else None)
    feed = Feed(source, work_of, 0, source.planner.stream.start, 2)  # type: ignore[arg-type]
    threading.Timer(0.3, release.set).start()
    first = feed.next()
    assert 0.05 < first.wait_seconds < WAIT
    # The second was asked for when the first was given: by the time it is ready there is nothing to wait for.
    assert feed._work is not None
    feed._work.result(WAIT)
    assert feed.next().wait_seconds < 0.05
    feed.close()


def test_a_plan_follows_from_the_stream_state_alone(corpus: Path) -> None:
    one, other = step_planner(corpus), step_planner(corpus)
    plans, state = [], one.stream.start
    for step in range(4):
        plans.append(one.plan(Topology(NODES), step, state).plan)
        state = plans[-1].after
    assert other.plan(Topology(NODES), 3, plans[2].after).plan == plans[3]  # without the steps before
    assert {p.sample for p in plans[0].placements}.isdisjoint(p.sample for p in plans[1].placements)


@pytest.fixture
def actor(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> PlannerActor:
    """The actor's class in this process: an object store that hands back what is put in."""
    monkeypatch.setattr(planner_module.ray, "put", lambda value: value)
    monkeypatch.setattr(planner_module.os, "nice", lambda increment: 0)  # the tests are not to be slowed
    return PlannerActor(config(plan={"look_ahead": 2}).model_dump(), str(corpus))


def calls(actor: PlannerActor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that are planned, in order."""
    made: list[int] = []
    original = actor._planner.plan

    def counted(topology: Topology, step: int, before: StreamState) -> PlannedStep:
        made.append(step)
        return original(topology, step, before)

    monkeypatch.setattr(actor._planner, "plan", counted)
    return made


def test_all_ranks_get_one_plan_and_the_look_ahead_is_made_unasked(
    actor: PlannerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls(actor, monkeypatch)

    async def ask() -> list[Any]:
        start = actor._planner.stream.start
        answers = await asyncio.gather(*(actor.plan(0, NODES, 0, start) for _ in range(8)))
        while len(actor._tasks) < 3 or not all(task.done() for task in actor._tasks.values()):
            await asyncio.sleep(0.01)
        return answers

    answers = asyncio.run(asyncio.wait_for(ask(), WAIT))
    assert len({id(planned) for (planned,) in answers}) == 1
    assert made == [0, 1, 2]


def test_a_new_attempt_discards_what_was_planned_and_the_old_one_is_refused(
    actor: PlannerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls(actor, monkeypatch)

    async def ask() -> None:
        start = actor._planner.stream.start
        (first,) = await actor.plan(0, NODES, 0, start)
        (again,) = await actor.plan(1, (2,), 0, start)
        assert again.plan.nodes == (2,)
        assert sorted(p.sample for p in again.plan.placements) == sorted(p.sample for p in first.plan.placements)
        with pytest.raises(RaypackError, match="attempt 0 asked for step 1 after attempt 1 had begun"):
            await actor.plan(0, NODES, 1, start)

    asyncio.run(asyncio.wait_for(ask(), WAIT))
    assert made.count(0) == 2


def test_every_rank_hears_why_a_step_cannot_be_planned(actor: PlannerActor) -> None:
    elsewhere = StreamState(0, 0, 10**9)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(actor.plan(0, NODES, 0, elsewhere) for _ in range(3)), return_exceptions=True)

    answers = asyncio.run(asyncio.wait_for(ask(), WAIT))
    assert len(answers) == 3
    assert all(isinstance(a, RaypackError) and "another corpus" in str(a) for a in answers)


def test_the_held_out_plan_is_made_once_for_all_ranks(actor: PlannerActor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Topology] = []
    original = actor._planner.held_out_plan
    monkeypatch.setattr(actor._planner, "held_out_plan", lambda topology: made.append(topology) or original(topology))

    async def ask() -> list[Any]:
        return await asyncio.gather(*(actor.held_out(NODES) for _ in range(4)))

    answers = asyncio.run(asyncio.wait_for(ask(), WAIT))
    assert len(made) == 1
    plan = answers[0][0]
    assert all(answer[0] is plan for answer in answers)
    assert 0 < plan.tokens <= 256


def test_plans_behind_the_run_are_forgotten(actor: PlannerActor) -> None:
    async def ask() -> None:
        state = actor._planner.stream.start
        for step in range(5):
            (planned,) = await actor.plan(0, NODES, step, state)
            state = planned.plan.after
        assert min(key[1] for key in actor._tasks) == 3

    asyncio.run(asyncio.wait_for(ask(), WAIT))
