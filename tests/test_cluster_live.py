"""`raypack cluster check --address`: what a running cluster says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypack.clusters.check import NodeType, check_cluster
from raypack.config import Config, DataSection, TopologySection
from raypack.driver.nodes import live_shape
from tests.machine import scaled

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def test_nodes_that_are_there_and_nodes_that_may_come_add_up() -> None:
    nodes = [{"CPU": 0.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0}]
    groups = [NodeType("head", 0, 0, 0, 1), NodeType("gpu", 8, 2, 0, 3)]
    shape = live_shape("auto", nodes, groups)
    topology = TopologySection(workers=1, gpus_per_worker=1)
    assert shape.workers(topology, ready=True) == 2
    assert shape.workers(topology) == 6
    assert shape.workers(TopologySection(workers=1, cpus_per_worker=4)) == 3 * 2 + 1


def test_nodes_alone_are_the_limit_where_nothing_scales() -> None:
    shape = live_shape("auto", [{"CPU": 2.0, "GPU": 2.0}], [])
    topology = TopologySection(workers=4, cpus_per_worker=1, gpus_per_worker=1)
    config = Config(topology=topology, data=DataSection(corpus="corpora/mine"))
    [fault] = check_cluster(config, shape).faults
    assert "need 4 GPU in bundles of (1 CPU, 1 GPU); cluster can give 2" in fault.text


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """Address of a Ray head with 4 CPUs."""
    log = tmp_path / "ray.log"
    short = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets lie below it: 107 bytes at most
    command = ["start", "--head", "--port=0", "--num-cpus=4", "--include-dashboard=false", "--block"]
    env = os.environ | {
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAYPACK_HOME": str(tmp_path / "home")
    }  # fmt: skip
    with open(log, "wb") as out:
        ray = subprocess.Popen([str(BIN / "ray"), *command, f"--temp-dir={short}"], stdout=out, stderr=out, env=env)
    try:
        deadline = time.monotonic() + scaled(60)
        while not (found := re.search(r"--address='?([\d.]+:\d+)", log.read_text(encoding="utf-8"))):
            assert ray.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.2)
        yield found[1]
    finally:
        ray.terminate()
        ray.wait(timeout=60)
        shutil.rmtree(short, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.rest
def test_a_live_cluster_is_asked_for_its_nodes_and_for_the_places_of_the_run(head: str, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    root, corpus = tmp_path / "runs", tmp_path / "corpus"
    run.write_text(f'[run]\nroot = "{root}"\n[data]\ncorpus = "{corpus}"\n[topology]\nworkers = 8\n', encoding="utf-8")
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "RAYPACK_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [str(BIN / "raypack"), "cluster", "check", str(run), "--address", head, "--json", "-"],
        capture_output=True, text=True, timeout=scaled(120), check=False, env=env, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    data = json.loads(done.stdout)
    assert data["workers_fitting"] == 4
    capacity, storage = data["faults"]
    assert "need 8 CPU in bundles of (1 CPU); cluster can give 4" in capacity["text"]
    assert storage["text"].startswith(f"data.corpus: {corpus} is not seen by node")
    assert not root.exists(), "a check makes no directory"
    assert not list(tmp_path.glob(".seen*")), "and leaves no file"
