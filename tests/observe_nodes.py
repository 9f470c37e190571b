"""Ranks on simulated nodes, and what the kernel counts there: for the tests that hold the ledger against it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from raypack.plan.names import SCOPES
from raypack.plan.topology import Topology
from tests.pool import Pool
from tests.simulated_nodes import SimulatedCluster

NODES = (2, 2)
WORLD = sum(NODES)
DEVICES = {"inter": "eth0", "intra": "lo"}
SEGMENT_BYTES = 1500
QUIET_SECONDS = 0.3
"""Longer than the kernel delays an acknowledgement."""
SERVE = (
    "import sys; from multiprocessing.connection import Connection; from tests.pool import _serve; "
    "_serve(int(sys.argv[1]), Connection(int(sys.argv[2])))"
)

Bytes = dict[tuple[str, str], int]
"""By (site or op, scope)."""


@dataclass(frozen=True)
class Counted:
    """Bytes by scope that the kernel sent; at most how many of them were sent again; the ledgers of all ranks."""

    kernel: dict[str, int]
    again: int
    ledger: Bytes


class NodesPool(Pool):
    """A pool whose ranks live on the nodes of a cluster of `NODES`, its head apart."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        for index in range(1, 1 + len(NODES)):
            # A busy machine acknowledges late: no probes for lost tails. One size of segments, so that those sent again
            # can be told in bytes.
            quiet = "echo 0 > /proc/sys/net/ipv4/tcp_early_retrans"
            cluster.output(["sh", "-c", f"{quiet} && ip link set lo mtu {SEGMENT_BYTES}"], index)
        super().__init__(WORLD)

    def _start(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(self.size):
            here, there = Pipe()
            process = self._cluster.popen(
                [sys.executable, "-c", SERVE, str(rank), str(there.fileno())],
                1 + Topology(NODES).node_of[rank],
                pass_fds=(there.fileno(),),
                cwd=str(Path(__file__).parents[1]),
            )
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(10)
        for pipe in self._pipes:
            pipe.close()

    def counted(self, function: Any, *args: Any) -> Counted:
        """Run on all ranks what returns (`Meter.read`, bytes of the ledger): kernel's once a node, ledgers added up."""
        results = self.run(WORLD, function, *args)
        of_nodes = [results[first][0] for first in Topology(NODES).node_firsts]
        ledger: Counter[tuple[str, str]] = Counter()
        for _, of_rank in results:
            ledger.update(of_rank)
        kernel = {scope: sum(node[scope] for node in of_nodes) for scope in SCOPES}
        return Counted(kernel, SEGMENT_BYTES * sum(node["again"] for node in of_nodes), dict(ledger))


class Meter:
    """On a rank: what its node sends between construction and `read`, all ranks standing still at both."""

    def __init__(self) -> None:
        self._before = self._standing()

    def read(self) -> dict[str, int]:
        """Bytes by scope, and TCP segments sent `again`."""
        after = self._standing()
        return {key: after[key] - self._before[key] for key in after}

    @staticmethod
    def _standing() -> dict[str, int]:
        dist.barrier()
        time.sleep(QUIET_SECONDS)
        sent = {
            scope: int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
            for scope, device in DEVICES.items()
        }
        dist.barrier()  # a rank that reads late would count what the others send next
        names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
        return {**sent, "again": int(dict(zip(names, values, strict=True))["RetransSegs"])}
