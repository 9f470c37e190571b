"""What a run tries again, and what it gives up: the controller's policies, without a cluster. Which Ray it takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.train.v2.api.preemption import PreemptionInfo

from raypack.checkpoint.state import RunState
from raypack.config import Config
from raypack.driver import elastic, failures, ray_internals
from raypack.driver.elastic import NodesInReach
from raypack.driver.failures import RunFailures
from raypack.driver.ray_internals import (
    ControllerError,
    ElasticScalingPolicy,
    FailureConfig,
    FailureDecision,
    NoopDecision,
    PreemptionError,
    ScalingConfig,
    WorkerGroupError,
    WorkerGroupStartupTimeoutError,
    WorkerGroupState,
    check_version,
    decided_size,
)
from raypack.errors import Leaving, LostRank, RaypackError
from raypack.plan.plan import StreamState
from raypack.training.progress import Whereabouts, stuck_ranks

ROOT = Path(__file__).resolve().parent.parent
RETRY, RAISE = FailureDecision.RETRY, FailureDecision.RAISE


def failed(*errors: Exception) -> WorkerGroupError:
    return WorkerGroupError("text", dict(enumerate(errors)))


def policy(tmp_path: Path, **run: Any) -> RunFailures:
    config = Config.model_validate({"run": {"failures_max": 2, **run}, "timeouts": {"nodes": 100, "start": 30}})
    return RunFailures(FailureConfig(max_failures=-1), config, str(tmp_path))


def save(tmp_path: Path, step: int) -> None:
    folder = tmp_path / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(RunState(step, StreamState(0, 0, 0), "m", "c").to_json())


def test_failures_in_a_row_are_counted_from_the_last_checkpoint(tmp_path: Path) -> None:
    judge = policy(tmp_path)
    lost = failed(RayActorError(), LostRank("rank 1 waited"))
    assert [judge.make_decision(lost) for _ in range(3)] == [RETRY, RETRY, RAISE]
    judge = policy(tmp_path)
    for step in (10, 20, 30):
        assert [judge.make_decision(lost) for _ in range(2)] == [RETRY, RETRY]
        save(tmp_path, step)
    assert [judge.make_decision(lost) for _ in range(3)] == [RETRY, RETRY, RAISE]


def test_what_raypack_refuses_is_not_tried_again_and_leaving_is_no_failure(tmp_path: Path) -> None:
    judge = policy(tmp_path, failures_max=0)
    assert judge.make_decision(failed(Leaving("before step 3"), Leaving("before step 3"))) == RETRY
    assert judge.make_decision(failed(Leaving("before step 3"), LostRank("rank 1 waited"))) == RETRY
    assert (
        judge.make_decision(PreemptionError(PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"a": [1]})))
        == RETRY
    )
    assert judge.make_decision(failed(LostRank("rank 0 waited"))) == RAISE
    judge = policy(tmp_path, failures_max=5)
    assert judge.make_decision(failed(LostRank("rank 0 waited"), RaypackError("no plan"))) == RAISE


def test_workers_that_cannot_be_started_are_waited_for_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: clock[0])
    judge = policy(tmp_path)
    late = ControllerError(WorkerGroupStartupTimeoutError(num_workers=2))
    decisions = []
    for _ in range(5):
        decisions.append(judge.make_decision(late))
        clock[0] += 30.0
    assert decisions == [RETRY, RETRY, RETRY, RETRY, RAISE]
    clock[0] += 10_000.0  # it has trained since: another row
    assert judge.make_decision(late) == RETRY
    assert judge.make_decision(ControllerError(ValueError("a bug"))) == RAISE


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A scaling policy over three nodes of two workers; what Ray believes, what answers, what drains."""
    scaling = ScalingConfig(num_workers=(2, 8), resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=0)
    judge = NodesInReach(scaling, 50.0)
    state: dict[str, Any] = {"policy": judge, "ray": {"a": 2, "b": 2, "c": 2}, "there": {"a", "b", "c"}, "going": set()}
    monkeypatch.setattr(elastic, "nodes_in_reach", lambda: state["there"])
    monkeypatch.setattr(ray_internals, "draining_nodes", lambda: state["going"])
    monkeypatch.setattr(elastic.time, "sleep", lambda _: None)
    monkeypatch.setattr(judge, "_maybe_send_resource_request", lambda: None)
    monkeypatch.setattr(
        ElasticScalingPolicy, "_get_reserved_resources",
        lambda self: {node: {"CPU": float(count)} for node, count in state["ray"].items()},
    )  # fmt: skip
    return state


def running(workers: int) -> Any:
    state = WorkerGroupState.__new__(WorkerGroupState)
    object.__setattr__(state, "start_time", 0.0)
    object.__setattr__(state, "workers", [None] * workers)
    return state


def test_a_group_is_sized_by_the_nodes_that_answer_and_stay(nodes: dict[str, Any]) -> None:
    judge = nodes["policy"]
    assert decided_size(judge.make_decision_for_non_running_worker_group()) == 6
    nodes["there"] = {"a", "b"}  # Ray has not noticed yet that c is gone
    assert decided_size(judge.make_decision_for_non_running_worker_group()) == 4
    nodes["going"] = {"b"}
    assert decided_size(judge.make_decision_for_non_running_worker_group()) == 2


def test_too_few_nodes_are_waited_for_and_then_named(nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: clock[0])
    nodes["there"] = set()
    judge = nodes["policy"]
    assert isinstance(judge.make_decision_for_non_running_worker_group(), NoopDecision)
    clock[0] = 51.0
    with pytest.raises(RaypackError, match=r"waited timeouts\.nodes = 50 s .* topology\.workers_min = 2 workers"):
        judge.make_decision_for_non_running_worker_group()


def test_a_group_grows_when_two_looks_find_the_same_room(nodes: dict[str, Any]) -> None:
    judge = nodes["policy"]
    nodes["ray"] = {"a": 2}

    def look() -> int:
        return decided_size(judge.make_decision_for_running_worker_group(running(2), None))

    assert [look(), look()] == [0, 0]
    nodes["ray"] = {"a": 2, "b": 2}
    assert look() == 0  # more may be on the way
    nodes["ray"] = {"a": 2, "b": 2, "c": 2}
    assert [look(), look()] == [0, 6]
    nodes["there"] = {"a", "b"}  # c is gone again, Ray does not know
    assert [look(), look()] == [0, 0]


def test_a_group_shrinks_at_once_for_a_node_that_will_be_taken_away(nodes: dict[str, Any]) -> None:
    judge = nodes["policy"]
    nodes["going"] = {"c"}
    assert decided_size(judge.make_decision_for_running_worker_group(running(6), None)) == 4
    nodes["going"], nodes["there"] = set(), {"a", "b"}  # gone without notice: its workers' failure says so
    assert decided_size(judge.make_decision_for_running_worker_group(running(6), None)) == 0


def at(step: int, phase: str, inside: str = "") -> Whereabouts:
    return Whereabouts(step, phase, 30.0, inside, False)


def test_the_rank_that_keeps_the_others_waiting_is_named() -> None:
    waiting = {0: at(7, "forward", "full_in"), 1: at(7, "agree"), 2: at(7, "gradient_reduce")}
    assert stuck_ranks(waiting) == ""  # everybody waits: nobody to blame
    assert stuck_ranks({**waiting, 3: None}).startswith("rank 3 did not answer")
    assert stuck_ranks({**waiting, 3: at(7, "backward")}) == "rank 3 is stuck in backward of step 7, for 30 s"
    assert stuck_ranks({**waiting, 3: at(7, "forward"), 4: at(6, "checkpoint")}).startswith("rank 4 is stuck in check")
    assert stuck_ranks({0: at(7, "forward"), 1: at(7, "forward")}) == ""


def test_a_ray_that_was_not_tried_is_refused_in_one_line() -> None:
    (major, first), (_, last) = ray_internals.TESTED
    check_version(f"{major}.{first}.0")
    check_version(f"{major}.{last}.3")
    for other in (f"{major}.{first - 1}.1", f"{major}.{last + 1}.0rc1", f"{major + 1}.0.0", "nightly"):
        with pytest.raises(RaypackError, match=rf"^Ray {other} is installed, raypack was tested with .* pip install"):
            check_version(other)


def test_the_declared_range_of_ray_is_the_tested_one() -> None:
    (major, first), (_, last) = ray_internals.TESTED
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert f"ray[train,default]>={major}.{first},<{major}.{last + 1}" in declared


def test_one_file_knows_rays_internals() -> None:
    """Ray Train's and the core's; of the autoscaler only its own reader of cluster files, which needs no torch."""
    inside = re.compile(r"^\s*(?:from|import) (ray\.(?:\w+\.)*_\w+|ray\.train\.v2|ray\._raylet)", re.MULTILINE)
    users = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "raypack").rglob("*.py")
        if inside.search(file.read_text(encoding="utf-8"))
    }
    assert users == {"raypack/driver/ray_internals.py", "raypack/clusters/files.py"}
