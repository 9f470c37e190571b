"""Through Ray: the observer actor and the ranks' reporters, whatever happens to the actor."""

from __future__ import annotations

import io
import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from raypack.driver.ray_internals import living_workers
from raypack.errors import RaypackError
from raypack.observe import observer
from raypack.observe.observer import head_node_options, start_observer
from raypack.observe.reporter import Pulses, Reporter
from raypack.observe.steps import read_steps
from raypack.report.follow import Follower
from raypack.report.view import RunView
from raypack.training.progress import Progress
from tests.observe_cases import report

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ray_started():
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield ray
        ray.shutdown()


def test_the_actor_serves_records_and_refuses_in_one_line(ray_started, tmp_path: Path) -> None:
    assert head_node_options()["num_cpus"] == 0
    assert "scheduling_strategy" in head_node_options()
    actor, url = start_observer(str(tmp_path / "r"), "r", "127.0.0.1", 0, ("note",), timeout=60)
    text = io.StringIO()
    reporters = [Reporter(actor) for _ in range(2)]
    progress = Progress()
    follower = Follower(
        actor, RunView(Console(file=text), steps=3), tmp_path, workers=1, alive=living_workers, interval=0.05
    )
    with follower, Pulses(actor, progress.pulse, interval=0.05):
        for phase, step in (("groups", None), ("plan_wait", 0), ("forward", None)):
            progress.enter(phase, step)
        for step in range(3):
            for rank, reporter in enumerate(reporters):
                reporter.send(report(rank, step))
        assert all(reporter.close(30) for reporter in reporters)
        deadline = time.monotonic() + 30
        while len(ray_started.get(actor.pulse.remote(), timeout=30)[0].start) < len(("start", "groups", "plan_wait")):
            assert time.monotonic() < deadline, "no pulse of the first step"
            time.sleep(0.05)
    shown = [line.split("  ")[0] for line in text.getvalue().splitlines()]
    assert [name for name in shown if name.startswith("step")] == [f"step {i} ({i + 1} of 3)" for i in range(3)]
    assert [name for name in shown if name in ("workers", "process group", "groups", "first plan")] == [
        "workers", "process group", "groups", "first plan",
    ]  # fmt: skip
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert b'raypack_step{run="r"} 2.0' in reply.read()

    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(RaypackError, match=rf"observe\.port = {port}"):
        start_observer(str(tmp_path / "s"), "s", "127.0.0.1", port, (), timeout=60)
    summary = ray_started.get(actor.finish.remote("over"), timeout=60)
    assert (summary.steps, summary.notes) == (3, ["note"])


def test_an_observer_that_dies_at_its_start_says_why_in_one_line(ray_started, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(RaypackError, match=r"died at its start: TypeError: .*NoneType") as raised:
        start_observer(None, "r", "127.0.0.1", 0, (), timeout=60)
    assert "File" not in str(raised.value)

    class Ending:
        def __init__(self, *arguments: object) -> None:
            os._exit(3)

        def opened(self) -> None:
            """Never reached."""

    monkeypatch.setattr(observer, "Observer", ray_started.remote(Ending))
    with pytest.raises(RaypackError, match=r"died at its start: Worker unexpectedly exits .*; its log is in") as raised:
        start_observer(str(tmp_path / "r"), "r", "127.0.0.1", 0, (), timeout=60)
    assert len(str(raised.value)) < 300
    assert "\n" not in str(raised.value)


def test_an_observer_killed_in_the_middle_loses_no_record_that_a_rank_still_holds(ray_started, tmp_path: Path) -> None:
    actor, _ = start_observer(str(tmp_path / "r"), "r", "127.0.0.1", 0, (), timeout=60)
    reporters = [Reporter(actor) for _ in range(2)]
    slowest = 0.0
    for step in range(30):
        if step == 10:
            ray_started.get(actor.latest.remote(), timeout=60)
            reporters[0].send(report(0, step))  # half a step is in the actor's memory only
            ray_started.get(actor.latest.remote(), timeout=60)
            ray_started.kill(actor, no_restart=False)
        for rank, reporter in enumerate(reporters):
            started = time.perf_counter()
            reporter.send(report(rank, step))
            slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 0.5, "a rank waited for the observer"
    with ThreadPoolExecutor(2) as ranks:  # a step is on record when the slower of them has sent it again
        assert list(ranks.map(lambda reporter: reporter.close(60), reporters)) == [True, True]
    assert [(r.step, r.complete) for r in read_steps(tmp_path / "r")] == [(step, True) for step in range(30)]
    summary = ray_started.get(actor.finish.remote(), timeout=60)
    assert (summary.steps, summary.incomplete_steps, summary.restarts) == (30, 0, 0)


def test_without_an_observer_a_rank_goes_on_and_holds_a_bounded_number_of_reports(ray_started, tmp_path: Path) -> None:
    actor, _ = start_observer(str(tmp_path / "r"), "r", "127.0.0.1", 0, (), timeout=60)
    ray_started.kill(actor)
    reporter = Reporter(actor, kept_max=8)
    started = time.perf_counter()
    for step in range(200):
        reporter.send(report(0, step))
    assert time.perf_counter() - started < 5
    assert len(reporter) == 8
    assert not reporter.close(0.3)


@pytest.mark.parametrize("interval", [0.0, 3600.0])
def test_short_steps_share_a_call_and_none_is_lost(ray_started, tmp_path: Path, interval: float) -> None:
    """The first goes at once; the others wait for the interval, for `flush`, or for the end."""
    actor, _ = start_observer(str(tmp_path / "r"), "r", "127.0.0.1", 0, (), timeout=60)
    reporters = [Reporter(actor, interval=interval) for _ in range(2)]

    def on_record() -> int:
        ray_started.get(actor.latest.remote(), timeout=60)  # behind all calls so far
        return len(read_steps(tmp_path / "r"))

    for step in range(4):
        for rank, reporter in enumerate(reporters):
            reporter.send(report(rank, step))
    assert on_record() == (1 if interval else 4)
    for reporter in reporters:
        reporter.flush()
    assert on_record() == 4
    for rank, reporter in enumerate(reporters):
        reporter.send(report(rank, 4))
    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(lambda reporter: reporter.close(30), reporters)) == [True, True]
    assert [(r.step, r.complete) for r in read_steps(tmp_path / "r")] == [(step, True) for step in range(5)]


def test_a_report_goes_within_the_interval_also_while_its_rank_is_stuck(ray_started, tmp_path: Path) -> None:
    actor, _ = start_observer(str(tmp_path / "r"), "r", "127.0.0.1", 0, (), timeout=60)
    reporters = [Reporter(actor, interval=0.5) for _ in range(2)]
    for step in range(2):
        for rank, reporter in enumerate(reporters):
            reporter.send(report(rank, step))
    deadline = time.monotonic() + 20
    while len(read_steps(tmp_path / "r")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [r.complete for r in read_steps(tmp_path / "r")] == [True, True]
