"""Links of single ranks: every rank of a simulated cluster has a network card of its own, as GPUs of a node have.

Each rank is one namespace of a `SimulatedCluster([1] * world, ray=False)`. What it sends to and receives from ranks of
its own (pretended) node is shaped to one rate, everything else to another, so that a method whose traffic crosses
nodes at a single rank cannot use its neighbours' cards.
"""

from __future__ import annotations

import subprocess

from raypack.errors import RaypackError
from raypack.plan.topology import Topology
from tests.simulated_nodes import SimulatedCluster


def shape_ranks(cluster: SimulatedCluster, topology: Topology, intra_rate: float, inter_rate: float) -> None:
    """Shape the links of ranks 0, 1, ... = members 1, 2, ... of `cluster`; bytes/s each way."""
    members = cluster.members[1 : 1 + topology.world]
    for rank, member in enumerate(members):
        mates = [
            m.address for r, m in enumerate(members) if topology.node_of[r] == topology.node_of[rank] and r != rank
        ]
        _shape(member.namespace, "eth0", "dst", mates, intra_rate, inter_rate)
        _shape(cluster._switch, f"p{member.index}", "src", mates, intra_rate, inter_rate)


def _shape(namespace: str, device: str, side: str, mates: list[str], intra_rate: float, inter_rate: float) -> None:
    def tc(*arguments: str) -> None:
        done = subprocess.run(
            ["tc", "-n", namespace, *arguments], capture_output=True, text=True, timeout=20, check=False
        )
        if done.returncode:
            raise RaypackError(f"tc {' '.join(arguments)}: {done.stderr.strip()}")

    tc("qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "20")
    for number, rate in ((10, intra_rate), (20, inter_rate)):
        bits, burst = f"{int(rate * 8)}bit", f"{max(int(rate / 250), 32_768)}"
        kind = ("parent", "1:", "classid", f"1:{number}", "htb", "rate", bits, "burst", burst, "cburst", burst)
        tc("class", "add", "dev", device, *kind, "quantum", "60000")
    for address in mates:
        match = ("match", "ip", side, f"{address}/32", "flowid", "1:10")
        tc("filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "prio", "1", "u32", *match)
