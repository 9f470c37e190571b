"""`raypack cluster check`: what a run needs against what a cluster file offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from raypack.cli import main
from raypack.clusters.check import ClusterShape, NodeType, check_cluster
from raypack.clusters.files import read_cluster_file
from raypack.config import Config, DataSection, RunSection, TopologySection
from raypack.errors import RaypackError

ROOT = Path(__file__).resolve().parent.parent
GPU_RUN = ["1f3s_gpu", "--data.corpus", "corpora/mine"]
SHIPPED = ["cluster.yaml", "kuberay/raycluster.yaml", "kuberay/rayjob.yaml"]
HEAD = NodeType("head", 0, 0, 1, 1)


def _config(workers: int, cpus: float, gpus: float = 0, **more: Any) -> Config:
    topology = TopologySection(workers=workers, cpus_per_worker=cpus, gpus_per_worker=gpus, **more)
    return Config(topology=topology, data=DataSection(corpus="corpora/mine"))


def _shape(*types: NodeType, nodes_max: int | None = None) -> ClusterShape:
    most = sum(kind.most for kind in types) if nodes_max is None else nodes_max
    return ClusterShape("cluster.yaml", types, most)


def _texts(config: Config, shape: ClusterShape) -> list[str]:
    return [fault.text for fault in check_cluster(config, shape).faults]


def _check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cluster", "check", *arguments])


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_cluster_files_hold_the_gpu_run(name: str) -> None:
    done = _check(*GPU_RUN, "--cluster-file", str(ROOT / name), "--json", "-")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["ok"]
    assert data["workers_fitting"] == data["workers"] == 64
    assert data["faults"] == []
    assert [note for note in data["notes"] if "share the storage" in note and "--address" in note]


def test_gpus_without_a_corpus_are_a_fault() -> None:
    done = _check(GPU_RUN[0], "--cluster-file", str(ROOT / "cluster.yaml"))
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: topology.gpus_per_worker = 1 and no data.corpus")


def test_too_few_nodes_at_the_clusters_largest_say_need_and_limit() -> None:
    [text] = _texts(_config(4, 4, 1), _shape(HEAD, NodeType("gpu", 8, 2, 0, 1)))
    assert "need 4 GPU in bundles of (4 CPU, 1 GPU); cluster can give 2" in text
    assert "lower topology.workers to 2, or let there be 2 of gpu" in text


def test_a_bundle_that_no_node_type_holds_is_named() -> None:
    report = check_cluster(_config(4, 2), _shape(HEAD, NodeType("small", 1, 0, 0, 100)))
    assert [fault.kind for fault in report.faults] == ["bundle"]
    assert "need 8 CPU in bundles of (2 CPU); cluster can give 0" in report.faults[0].text
    assert "small, has (1 CPU)" in report.faults[0].text


def test_a_worker_is_never_split_over_two_nodes() -> None:
    report = check_cluster(_config(4, 3), _shape(HEAD, NodeType("four", 4, 0, 0, 3)))
    assert report.fitting == 3
    assert [fault.kind for fault in report.faults] == ["capacity"]
    assert check_cluster(_config(4, 0.1), _shape(NodeType("head", 0.3, 0, 1, 1))).fitting == 3


def test_an_elastic_run_needs_its_least_world_and_is_told_what_it_never_reaches() -> None:
    shape = _shape(HEAD, NodeType("gpu", 16, 2, 0, 2))
    report = check_cluster(_config(8, 1, 1, workers_min=4), shape)
    assert report.ok
    assert any("at most 4 of topology.workers = 8" in note for note in report.notes)
    [text] = _texts(_config(8, 1, 1, workers_min=5), shape)
    assert text.startswith("topology.workers_min = 5: need 5 GPU")


def test_the_limit_over_all_types_holds_and_nodes_that_are_always_there_take_their_part() -> None:
    types = (HEAD, NodeType("big", 8, 0, 0, 4), NodeType("small", 2, 0, 2, 4))
    config = _config(1, 1)
    assert check_cluster(config, _shape(*types)).fitting == 4 * 8 + 4 * 2
    assert check_cluster(config, _shape(*types, nodes_max=5)).fitting == 2 * 8 + 2 * 2
    assert check_cluster(config, _shape(*types)).ready == 4


@given(
    types=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4), st.integers(0, 2), st.integers(0, 3)), max_size=3),
    spare=st.integers(0, 6),
    cpus=st.integers(1, 4),
    gpus=st.integers(0, 2),
)
def test_fitting_is_the_best_choice_of_nodes(
    types: list[tuple[int, int, int, int]], spare: int, cpus: int, gpus: int
) -> None:
    kinds = [NodeType(f"t{i}", c, g, least, least + more) for i, (c, g, least, more) in enumerate(types)]
    nodes_max = sum(kind.least for kind in kinds) + spare
    topology = TopologySection(workers=1, cpus_per_worker=cpus, gpus_per_worker=gpus)

    def best(left: list[NodeType], nodes: int) -> int:
        if not left:
            return 0
        first, rest = left[0], left[1:]
        reserved = sum(kind.least for kind in rest)
        counts = range(first.least, min(first.most, nodes - reserved) + 1)
        one = min(int(first.cpus) // cpus, int(first.gpus) // gpus if gpus else 10**6)
        return max(count * one + best(rest, nodes - count) for count in counts)

    assert ClusterShape("", tuple(kinds), nodes_max).workers(topology) == best(kinds, nodes_max)


@pytest.mark.parametrize("key", ["run.root", "data.corpus", "run.resume"])
def test_a_place_below_each_nodes_own_home_is_a_fault(key: str) -> None:
    done = _check(*GPU_RUN, f"--{key}", "~/runs", "--cluster-file", str(ROOT / "cluster.yaml"))
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {key} = '~/runs' is each node's own")


def test_a_live_clusters_nodes_say_themselves_what_they_see() -> None:
    config = _config(1, 1).model_copy(update={"run": RunSection(root="~/runs")})
    types = (HEAD, NodeType("one", 1, 0, 1, 1))
    assert [fault.kind for fault in check_cluster(config, _shape(*types)).faults] == ["storage"]
    report = check_cluster(config, ClusterShape("10.0.0.1:6379", types, 2, live=True))
    assert report.ok
    assert not [note for note in report.notes if "storage" in note]


@pytest.fixture
def launcher() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def manifest() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "kuberay" / "raycluster.yaml").read_text(encoding="utf-8"))
    return json.loads(json.dumps(found))  # what an anchor names becomes separate data


def _of(config: dict[str, Any], tmp_path: Path) -> ClusterShape:
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return read_cluster_file(file)


def test_pods_that_no_autoscaler_adds_do_not_count(manifest: dict[str, Any], tmp_path: Path) -> None:
    spec = manifest["spec"]
    spec["enableInTreeAutoscaling"] = False
    spec["workerGroupSpecs"][0]["replicas"] = 3
    topology = TopologySection(workers=64, gpus_per_worker=1)
    assert _of(manifest, tmp_path).workers(topology) == 24


def test_every_fault_is_one_line_and_the_json_has_them_all(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    given = [*GPU_RUN, "--topology.workers", "128", "--topology.workers_min", "128", "--data.corpus", "~/data"]
    done = _check(*given, "--cluster-file", str(ROOT / "cluster.yaml"), "--json", str(out))
    assert done.exit_code == 2
    faults = json.loads(out.read_text(encoding="utf-8"))["faults"]
    assert [fault["kind"] for fault in faults] == ["capacity", "storage"]
    assert done.stderr.splitlines() == [f"error: {fault['text']}" for fault in faults]


def test_what_is_no_fault_but_costs_time_is_noted() -> None:
    shape = _shape(HEAD, NodeType("gpu", 64, 4, 0, 16))
    data = {
        "plan": {"cluster": "h100-8x8"},
        "data": {"corpus": "corpora/mine"},
        "topology": {"workers": 64, "gpus_per_worker": 1},
        "timeouts": {"start": 180},
    }
    notes = check_cluster(Config.model_validate(data), shape).notes
    assert any("nodes with 8 ranks, these nodes hold gpu 4" in note for note in notes)
    assert any("timeouts.start = 180 s" in note for note in notes)
    data["timeouts"] = {"start": 600}
    assert not any("timeouts.start" in note for note in check_cluster(Config.model_validate(data), shape).notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot read"),
        ("", "must be a mapping"),
        ("[1, 2]", "must be a mapping"),
        ("a: 1", "is no cluster file"),
        ("apiVersion: ray.io/v1\nkind: RayService\nspec: {}", "must be RayCluster or RayJob"),
        ("apiVersion: ray.io/v1\nkind: RayJob\nspec: {clusterSelector: {a: b}}", "clusterSelector"),
        ("apiVersion: ray.io/v1\nkind: RayCluster\nspec: {}", "no headGroupSpec"),
        ("apiVersion: ray.io/v1\nkind: RayCluster\nspec: {headGroupSpec: {}}", "refused by Ray's autoscaler"),
        ("provider: {type: local, head_ip: a, worker_ips: [b]}\ncluster_name: x", "give --address"),
        ("provider: {type: moon}\ncluster_name: x", "refused by Ray"),
    ],
)
def test_a_file_that_is_no_cluster_file_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    done = _check(*GPU_RUN, "--cluster-file", str(file))
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(max_worker=8), "max_worker"),
        (lambda c: c["available_node_types"]["gpu"].update(min_workers=9), "max_workers"),
        (lambda c: c["available_node_types"]["gpu"].update(resources={}), "does not say its CPUs"),
    ],
    ids=["unknown-key", "min-over-max", "no-resources"],
)
def test_what_ray_refuses_is_refused_here_in_one_line(
    launcher: dict[str, Any], tmp_path: Path, change: Any, message: str
) -> None:
    change(launcher)
    with pytest.raises(RaypackError, match=message):
        _of(launcher, tmp_path)


def test_missing_files_and_both_sources_are_clear_errors(tmp_path: Path) -> None:
    for arguments, message in (
        ([*GPU_RUN, "--cluster-file", str(tmp_path / "none.yaml")], "cannot read"),
        ([str(tmp_path / "none.toml"), "--cluster-file", str(ROOT / "cluster.yaml")], "cannot read"),
        ([*GPU_RUN, "--cluster-file", "x", "--address", "auto"], "give one of them"),
        ([*GPU_RUN, "--topology.worker", "3"], "--topology.worker: did you mean --topology.workers?"),
        ([*GPU_RUN, "--topology.workers_min", "65"], "exceeds workers = 64"),
    ):
        done = _check(*arguments)
        assert done.exit_code == 2, done.output
        [line] = done.stderr.splitlines()
        assert message in line
