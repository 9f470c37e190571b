"""What a cloud does to a run, on simulated nodes: nodes die, are taken away with notice, and come."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from raypack.observe.summary import read_summary
from tests.chaos import check, unbroken
from tests.elastic_runs import ElasticRun
from tests.simulated_nodes import SimulatedCluster, why_not

pytestmark = [pytest.mark.ray, pytest.mark.rest, pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible")]


def test_a_node_dies_and_two_come_and_the_run_is_the_one_that_was_left_alone(tmp_path: Path) -> None:
    """2 nodes, 1, then 3: nothing lost, nothing twice, and where Ray grows the group no step is repeated."""
    topology = {"workers": 6, "workers_min": 2}
    sections = {"run": {"steps": 60, "failures_max": 1}, "train": {"checkpoint_every": 4}, "topology": topology}
    with (
        SimulatedCluster([2, 2]) as cluster,
        ElasticRun(cluster, tmp_path, [(10, 4, 0.7), (30, 2, 4.0), (30, 4, 3.0)], **sections) as run,
    ):
        run.wait_until(run.reached(10, 4), "step 10 with 4 workers")
        cluster.kill(2)  # in the middle of a step: a held step takes 0.7 s
        run.wait_until(run.reached(12, 2), "step 12 with 2 workers")
        cluster.add(2)
        cluster.add(2)
        run.wait_until(run.reached(30, 6), "step 30 with 6 workers")
        assert run.wait() == 0, run.console
        records, events = run.records(), run.events()

    check(records, unbroken(run.config, str(run.corpus), tmp_path / "whole"), 1e-4)
    ends = {event.attempt: event for event in events if event.event == "ended"}
    assert "did not answer" in ends[0].reason or "its process died" in ends[0].reason
    # Grown after a checkpoint, once where both nodes had come: the only steps done again are those that the kill took.
    worlds = list({record.attempt: record.world for record in records}.values())
    assert worlds in ([4, 2, 6], [4, 2, 4, 6])
    assert {ends[attempt].reason for attempt in range(1, len(worlds) - 1)} == {"left as asked"}
    assert {r.attempt for r in records if not r.effective} <= {0}
    assert sum(not r.effective for r in records) <= 4 + 3  # an interval, and what was trained while one was written
    summary = read_summary(run.run_dir)
    assert summary is not None
    assert (summary.stop_reason, summary.restarts, summary.worlds) == ("finished", len(worlds) - 1, worlds)


def test_a_node_that_is_taken_away_with_notice_costs_no_step_and_is_no_failure(tmp_path: Path) -> None:
    sections = {
        "run": {"steps": 40, "failures_max": 0},
        "train": {"checkpoint_every": 0},
        "topology": {"workers": 4, "workers_min": 2},
    }
    with SimulatedCluster([2, 2]) as cluster, ElasticRun(cluster, tmp_path, [(8, 4, 1.5)], **sections) as run:
        run.wait_until(run.reached(8, 4), "step 8 with 4 workers")
        drained, notice = time.time(), 40.0
        node = cluster.node_id(2)
        drain = [
            "drain-node", "--address", cluster.address, "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message", "test", "--deadline-remaining-seconds", str(int(notice)),
        ]  # fmt: skip
        cluster.output([str(Path(sys.executable).with_name("ray")), *drain])
        run.wait_until(run.reached(9, 2), "a step with 2 workers")
        cluster.kill(2)
        assert run.wait() == 0, run.console
        records, events = run.records(), run.events()

    (asked,) = [event for event in events if event.event == "asked"]
    assert "taken away" in asked.reason
    left = next(event for event in events if event.event == "ended" and event.attempt == 0)
    assert left.time - drained < notice
    assert [record.step for record in records] == list(range(40))  # without regular checkpoints, and none repeated
    check(records, unbroken(run.config, str(run.corpus), tmp_path / "whole"), 1e-4)
