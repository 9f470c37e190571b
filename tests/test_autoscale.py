"""Ray's autoscaler, on one machine: a run asks for more workers than fit, nodes come, it grows, and they go when idle.

Ray's fake provider starts a raylet for each node that the autoscaler wants; the rest is as on a cloud. In a network
namespace of its own, like the simulated nodes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from raypack.errors import RaypackError
from raypack.observe.summary import read_summary
from tests.chaos import check, unbroken
from tests.elastic_runs import ElasticRun
from tests.simulated_nodes import SimulatedCluster, why_not

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible"),
]
HEAD_ID = "f" * 51 + "00000"
CPUS, NODES_MAX = 2, 4
HEAD_TYPE = "ray.head.default"  # what the fake provider calls it
NODE_TYPES = {
    HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0},
    "worker": {"resources": {"CPU": CPUS}, "node_config": {}, "min_workers": 1, "max_workers": NODES_MAX},
}
SETTINGS = {
    "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
}  # fmt: skip
# What the cluster launcher would fill in: nothing to set up.
EMPTY = {"auth": {}, "file_mounts": {}, "cluster_synced_files": [], "docker": {}} | {
    f"{when}_commands": []
    for when in ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
}
ALIVE = """
import sys
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5).values()
print(sum(n.state == 0 for n in nodes) - 1)
"""


@contextmanager
def autoscaling(folder: Path) -> Iterator[SimulatedCluster]:
    """A head whose autoscaler has 1 to `NODES_MAX` nodes of `CPUS` CPUs to give."""
    with SimulatedCluster([], ray=False, env={"RAY_USAGE_STATS_ENABLED": "0"}) as cluster:
        provider = {
            "type": "external", "gcs_address": cluster.address, "launch_multiple": True, "head_node_id": HEAD_ID,
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        }  # fmt: skip
        described = {
            "cluster_name": "fake", "max_workers": NODES_MAX, "idle_timeout_minutes": 0.25, "provider": provider,
            "available_node_types": NODE_TYPES, "head_node_type": HEAD_TYPE, **EMPTY,
        }  # fmt: skip
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(described))
        host, port = cluster.address.split(":")
        with open(folder / "head.log", "wb") as log:
            cluster.popen(
                [
                    str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus", "0",
                    "--port", port, "--node-ip-address", host, "--dashboard-host", host,
                    "--temp-dir", str(cluster.folder / "ray"), f"--autoscaling-config={file}",
                ],
                env=SETTINGS, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        wait_for_nodes(cluster, 1, 60)
        yield cluster


def alive(cluster: SimulatedCluster) -> int:
    """Nodes besides the head; -1 while there is no head."""
    try:
        return int(cluster.output([sys.executable, "-c", ALIVE, cluster.address]).split()[-1])
    except RaypackError:
        return -1


def wait_for_nodes(cluster: SimulatedCluster, count: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while (found := alive(cluster)) != count:
        assert time.monotonic() < deadline, f"{found} nodes after {timeout:g} s, not {count}"
        time.sleep(1.0)


def test_a_run_starts_on_what_is_there_and_grows_with_the_nodes_that_it_asks_for(tmp_path: Path) -> None:
    workers = CPUS * NODES_MAX
    sections = {
        "run": {"steps": 40, "failures_max": 1},
        "train": {"checkpoint_every": 0},
        "topology": {"workers": workers, "workers_min": CPUS, "resize_seconds": 3.0},
    }
    holds = [(5, CPUS, 3.0), *((20, world, 3.0) for world in range(CPUS + 1, workers))]
    with autoscaling(tmp_path) as cluster:
        with ElasticRun(cluster, tmp_path, holds, **sections) as run:
            run.wait_until(run.reached(0, CPUS), f"a step with {CPUS} workers")
            run.wait_until(run.reached(6, workers), f"a step with {workers} workers")
            assert run.wait() == 0, run.console
            records = run.records()
        assert [record.step for record in records] == list(range(40))  # restored where it was, no step repeated
        check(records, unbroken(run.config, str(run.corpus), tmp_path / "whole"), 1e-4)
        summary = read_summary(run.run_dir)
        assert summary is not None
        assert (summary.worlds[0], summary.worlds[-1]) == (CPUS, workers)
        wait_for_nodes(cluster, 1, 120)  # idle ones go
