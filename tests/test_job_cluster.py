"""Jobs on a Ray cluster that is there already: submitted from elsewhere, with and without an upload, stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypack.observe.steps import read_steps
from raypack.observe.summary import read_summary
from raypack.plan.plan_file import plan_from_json
from tests.job_runs import Cluster, Started, clean_copy, start_job, tiny_corpus, tiny_run
from tests.machine import scaled

pytestmark = [pytest.mark.ray, pytest.mark.rest]

# As many CPUs as workers, one on each node: a planner or an observer that asked for one would leave no room for them.
NODES = (1, 1)
WORKERS = sum(NODES)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone in which somebody has already worked."""
    target = clean_copy(tmp_path_factory.mktemp("clone") / "raypack")
    for folder in (".venv", "runs/old", "corpora/mine"):
        (target / folder).mkdir(parents=True)
        (target / folder / "big.bin").write_bytes(bytes(100_000))
    return target


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, clone: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), cwd=clone, cpus=NODES) as started:
        yield started


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    sections = {"run": {"root": "runs"}, "topology": {"workers": WORKERS, "nodes": []}, "plan": {"keep": True}}
    return tiny_run(folder, tiny_corpus(folder / "corpus"), **sections)


def entrypoint(run_file: Path, *more: str) -> list[str]:
    return ["--", "python", "jobs/train_1f3s.py", "--run", str(run_file), *more]


def test_a_submitted_job_trains_and_keeps_its_run_below_raypack_home(
    cluster: Cluster, run_file: Path, tmp_path: Path
) -> None:
    with cluster.submit(tmp_path, *entrypoint(run_file, "--run.name", "sent")) as job:
        assert job.wait() == 0, job.out + job.err
        assert "finished" in job.out
    run_dir = cluster.home / "runs" / "sent"
    summary = read_summary(run_dir)
    assert summary is not None
    assert (summary.stop_reason, summary.steps, summary.worlds) == ("finished", 6, [WORKERS])
    assert [record.complete for record in read_steps(run_dir)] == [True] * 6
    # Two machines, as far as Ray knows: nothing here is simulated.
    assert not [note for note in summary.notes if "simulated" in note]
    plan = plan_from_json((run_dir / "plans" / "step-00000003.json").read_text())
    assert plan.nodes == NODES
    assert sum(scopes["intra"] for scopes in summary.collective_bytes.values()) == 0
    assert summary.collective_bytes["gradient_reduce"]["inter"] > 0


def test_an_uploaded_job_leaves_environments_corpora_and_runs_behind_and_stops_when_asked(
    cluster: Cluster, clone: Path, run_file: Path, tmp_path: Path
) -> None:
    command = entrypoint(run_file, "--run.name", "carried", "--run.steps", "1000000")
    with cluster.submit(tmp_path, "--working-dir", ".", *command, cwd=clone) as job:
        job.wait_until(lambda: "step 2 " in job.out, "step 2")
        (copy,) = cluster.session.glob("node-0/session_latest/runtime_resources/working_dir_files/*/jobs")
        names = {entry.name for entry in copy.parent.iterdir()}
        assert {"jobs", "raypack"} <= names
        assert names.isdisjoint({".git", ".venv", "runs", "corpora", "shared"})
        assert (copy / "train_1f3s.py").is_file()
        (identity,) = set(re.findall(r"raysubmit_\w+", job.out))
        with Started([cluster.ray, "job", "stop", identity], tmp_path / "stop",
                     {**cluster.env, "RAY_ADDRESS": f"http://{cluster.dashboard}"}) as stop:  # fmt: skip
            assert stop.wait(60) == 0, stop.out + stop.err
        job.wait(60)
        assert "error: stopped by SIGTERM" in job.out
    summary = read_summary(cluster.home / "runs" / "carried")
    assert summary is not None
    assert summary.stop_reason == "interrupted"
    assert summary.steps >= 3
    assert free_cpus(cluster) == WORKERS


def test_an_existing_cluster_counts_as_it_is(cluster: Cluster, run_file: Path, tmp_path: Path) -> None:
    workers = ("--topology.workers", "3", "--run.ray_address", cluster.address)
    with start_job(tmp_path, "--run", str(run_file), *workers, env=cluster.env) as job:
        assert job.wait(90) == 2, job.out + job.err
        assert "topology.workers = 3 need 3 CPU (1 each), the Ray cluster has 2" in job.err
        assert "Traceback" not in job.err


def test_a_place_that_a_node_does_not_see_is_named_with_the_node(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    corpus = tiny_corpus(tmp_path / "corpus", documents=5)
    code = (
        "import sys, logging, ray; from pathlib import Path\n"
        "from raypack.errors import RaypackError; from raypack.driver.nodes import check_places\n"
        "ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)\n"
        "check_places(Path(sys.argv[2]), Path(sys.argv[3]), 60)\n"
        "try:\n    check_places(Path(sys.argv[2]), Path('/nowhere/corpus'), 60)\n"
        "except RaypackError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code, cluster.address, str(tmp_path / "run"), str(corpus)]
    done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=scaled(150), check=False)
    assert done.returncode == 0, done.stderr
    assert "does not see /nowhere/corpus: put run.root and data.corpus on storage that all nodes share" in done.stdout
    assert list((tmp_path / "run").iterdir()) == []


def free_cpus(cluster: Cluster) -> float:
    """CPUs that nothing holds, once the actors of ended jobs are gone."""
    code = (
        "import sys, time, ray\n"
        "ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)\n"
        "end = time.monotonic() + 30\n"
        "while (free := ray.available_resources().get('CPU', 0)) < float(sys.argv[2]) and time.monotonic() < end:\n"
        "    time.sleep(0.2)\n"
        "print(free)\n"
    )
    command = [sys.executable, "-c", code, cluster.address, str(WORKERS)]
    done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=scaled(90), check=True)
    return float(done.stdout)
