"""Where ranks run and where files lie: topology from node names, bundles on nodes, paths, the run directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raypack.checkpoint.state import RunState
from raypack.config import Config, RunSection
from raypack.driver.rundir import held, resolve_run, write_config
from raypack.errors import RaypackError
from raypack.files import JOB_MARK, absolute
from raypack.plan.places import topology_of
from raypack.plan.plan import StreamState
from raypack.plan.topology import Block


def test_ranks_of_a_node_side_by_side_make_its_blocks() -> None:
    found = topology_of([("B", 0), ("B", 1), ("A", 0), ("A", 1), ("A", 2)])
    assert found.nodes == (2, 3)
    assert all(found.in_one_node(b) for b in found.blocks if b.width <= 3 and b != Block(0, 5))


def test_node_names_are_compared_never_sorted_as_text() -> None:
    # As text 10.0.0.10 comes before 10.0.0.2; ranks follow the order that the cluster gave them.
    places = [(f"10.0.0.{i}", local) for i in (2, 9, 10) for local in (0, 1)]
    assert topology_of(places).nodes == (2, 2, 2)


def test_ranks_that_are_not_contiguous_on_a_node_are_refused_by_name() -> None:
    with pytest.raises(RaypackError, match=r"rank 2 is on node A like rank 0, with ranks of node B between"):
        topology_of([("A", 0), ("B", 0), ("A", 1), ("B", 1)])


def test_local_ranks_out_of_order_are_refused() -> None:
    with pytest.raises(RaypackError, match="rank 1 has local rank 0 on node A, after 1"):
        topology_of([("A", 1), ("A", 0)])


def test_two_nodes_of_one_machine_need_not_count_from_zero() -> None:
    # Ray counts local ranks by address, and two raylets may share one.
    assert topology_of([("A", 0), ("A", 1), ("B", 2), ("B", 3)]).nodes == (2, 2)


def test_relative_paths_lie_below_raypack_home_in_a_ray_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPACK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(JOB_MARK, raising=False)
    assert absolute("runs") == tmp_path / "runs"
    monkeypatch.setenv(JOB_MARK, "{}")
    assert absolute("runs") == tmp_path / "home" / "runs"
    assert absolute("/data/runs") == Path("/data/runs")


def config(root: Path, **run: object) -> Config:
    return Config(run=RunSection(root=str(root), **{"name": "r", **run}))  # type: ignore[arg-type]


def test_a_directory_with_records_is_another_run_unless_resumed(tmp_path: Path) -> None:
    assert resolve_run(config(tmp_path)) == (tmp_path / "r", None)
    assert resolve_run(config(tmp_path, resume="auto")) == (tmp_path / "r", None)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "steps.jsonl").touch()
    assert resolve_run(config(tmp_path)) == (tmp_path / "r", None)  # it ended before its first step
    (tmp_path / "r" / "steps.jsonl").write_text("{}\n")
    with pytest.raises(RaypackError, match="holds a run already"):
        resolve_run(config(tmp_path))
    assert resolve_run(config(tmp_path, resume="auto")) == (tmp_path / "r", None)  # it had saved nothing yet
    (tmp_path / "r" / "checkpoints" / "step-00000050").mkdir(parents=True)
    with pytest.raises(RaypackError, match=r"no complete checkpoint.*step-00000050, which is damaged"):
        resolve_run(config(tmp_path, resume="auto"))
    with pytest.raises(RaypackError, match="no checkpoint directory"):
        resolve_run(config(tmp_path, resume=str(tmp_path / "none")))


def test_a_run_never_goes_back_behind_checkpoints_that_a_restart_would_take(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = tmp_path / "r" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(RunState(step, StreamState(0, 0, 0), "m", "c").to_json())
    older, newest = (str(tmp_path / "r" / "checkpoints" / f"step-{step:08d}") for step in (10, 20))
    assert resolve_run(config(tmp_path, resume=newest)) == (tmp_path / "r", newest)
    with pytest.raises(RaypackError, match=r"has checkpoints of its own, up to .*step-00000020"):
        resolve_run(config(tmp_path, resume=older))
    with pytest.raises(RaypackError, match=r"checkpoints of a run of this name, up to .*step-00000020"):
        resolve_run(config(tmp_path))  # its records were removed, or lie below another run.root
    assert resolve_run(config(tmp_path, name="other", resume=older)) == (tmp_path / "other", older)


def test_two_drivers_never_share_a_run_directory(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from raypack.errors import RaypackError\n"
        "from raypack.driver.rundir import held\n"
        "try:\n    with held(Path(sys.argv[1])): print('in')\n"
        "except RaypackError as error: print(error)\n"
    )

    def other() -> str:
        command = [sys.executable, "-c", code, str(tmp_path / "r")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    with held(tmp_path / "r"):
        assert "belongs to a run that goes on (process " in other()
    assert other() == "in"


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RaypackError, match=r"cannot write to .*file/r: .*choose another run\.root"),
        held(tmp_path / "file" / "r"),
    ):
        pass


def test_the_written_config_is_the_same_run_from_anywhere(tmp_path: Path) -> None:
    from raypack.config.runfile import load_run

    given = config(tmp_path / "runs", steps=3, resume="auto")
    (tmp_path / "runs" / "r").mkdir(parents=True)
    write_config(tmp_path / "runs" / "r", given, tmp_path / "corpus")
    again = load_run(["--run", str(tmp_path / "runs" / "r" / "config.toml")])
    assert resolve_run(again) == (tmp_path / "runs" / "r", None)
    assert again.data.corpus == str(tmp_path / "corpus")
    assert again.run.steps == 3
    assert again.run.resume == "never"
