"""Simulated nodes: shaped links, a node that dies, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raypack.errors import RaypackError
from tests.simulated_nodes import SETTINGS, SimulatedCluster, _namespaces, sweep, why_not

pytestmark = [pytest.mark.ray, pytest.mark.rest, pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible")]

ROOT = Path(__file__).resolve().parent.parent
SEND = """
import socket, sys, time
host, size = sys.argv[1], int(sys.argv[2])
with socket.create_connection((host, 5000), timeout=30) as s:
    start = time.perf_counter(); s.sendall(bytes(size)); s.shutdown(1); s.recv(1)
print(time.perf_counter() - start)
"""
RECEIVE = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000)); server.settimeout(60)
print("ready", flush=True)
for _ in range(2):
    s, _ = server.accept()
    while s.recv(1 << 20): pass
    s.sendall(b"x"); s.close()
"""


def left_behind(name: str) -> list[str]:
    folders = os.listdir(SETTINGS) if SETTINGS.exists() else []
    return [n for n in [*_namespaces(), *folders] if n.startswith(name)]


def test_links_have_their_rates_and_the_kernel_counts_what_crosses():
    with SimulatedCluster([1, 1], inter_rate=5e6, intra_rate=35e6, ray=False) as cluster:
        size = 6_000_000
        receiver = cluster.popen([sys.executable, "-c", RECEIVE], 1, stdout=subprocess.PIPE)
        assert receiver.stdout.readline().strip() == b"ready"
        before = cluster.interface_bytes(2)["inter"]
        address = cluster.members[1].address
        across = float(cluster.output([sys.executable, "-c", SEND, address, str(size)], 2))
        inside = float(cluster.output([sys.executable, "-c", SEND, address, str(size)], 1))
        receiver.wait(20)
        sent = cluster.interface_bytes(2)["inter"] - before
    assert size <= sent <= 1.1 * size  # headers and acknowledgements
    assert across == pytest.approx(size / 5e6, rel=0.35)
    assert 3 < across / inside < 12
    assert left_behind(cluster._name) == []
    assert not cluster.folder.exists()


def test_a_killed_node_loses_its_processes_and_the_others_stay():
    with SimulatedCluster([1, 1], ray=False) as cluster:
        sleepers = [cluster.popen(["sleep", "60"], index) for index in (1, 2)]
        cluster.kill(1)
        assert sleepers[0].wait(10) != 0
        assert sleepers[1].poll() is None
    assert sleepers[1].wait(10) != 0


def test_a_fault_inside_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), SimulatedCluster([1], ray=False) as cluster:
        1 / 0  # noqa: B018
    assert left_behind(cluster._name) == []


def test_what_a_killed_owner_left_is_swept():
    code = (
        "from tests.simulated_nodes import SimulatedCluster\n"
        "import sys, time\n"
        "with SimulatedCluster([1], ray=False) as c:\n"
        "    print(c._name, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        name = owner.stdout.readline().decode().strip()
        assert left_behind(name)
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    sweep()
    assert left_behind(name) == []


def test_ctrl_c_leaves_nothing_behind():
    code = (
        "from tests.simulated_nodes import SimulatedCluster\n"
        "import time\n"
        "with SimulatedCluster([1], ray=False) as c:\n"
        "    print(c._name, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as owner:
        name = owner.stdout.readline().decode().strip()
        owner.send_signal(signal.SIGINT)
        assert owner.wait(30) != 0
    assert left_behind(name) == []


@pytest.mark.slow
def test_ray_sees_the_nodes_notices_a_death_and_takes_a_new_one():
    count = "import ray; ray.init(logging_level='ERROR'); print(sum(n['Alive'] for n in ray.nodes()))"

    def alive() -> int:
        return int(cluster.output([sys.executable, "-c", count]).splitlines()[-1])

    with SimulatedCluster([2, 2]) as cluster:
        assert alive() == 3
        cluster.kill(2)
        deadline = time.monotonic() + 60
        while alive() != 2:
            assert time.monotonic() < deadline, "the dead node is still taken for alive"
        cluster.add(4)
        assert alive() == 3


def test_without_root_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RaypackError, match="need root"):
        SimulatedCluster([1])
