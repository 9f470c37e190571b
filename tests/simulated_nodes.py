"""Simulated nodes: one machine as several, for tests and benchmarks of what crosses a network.

Every node is a network namespace with its own address and raylet, joined by a bridge in a namespace of its own (the
host's interfaces are not touched). With rates given, links between nodes and traffic inside a node (which goes over the
node's loopback) are shaped with a token bucket, so that their ratio does not depend on the machine. Added delay is not
simulated. Needs root, iproute2, and for Ray the `ray` command.

    with SimulatedCluster([4, 4], inter_rate=25e6, intra_rate=140e6) as cluster:
        cluster.run(["ray", "status"])
        cluster.kill(1)
        cluster.add(4)

Whatever happens, Ctrl-C included, namespaces and processes are gone afterwards; what a killed process (SIGKILL) left is
swept by the next cluster that starts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from raypack.errors import RaypackError

NETWORK = "10.77.0"
PORT = 6379
PREFIX = "raypack"
SETTINGS = Path("/etc/netns")
#: a dead node is noticed in seconds; the cluster files have the same names with production values
HEALTH_CHECK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
_serial = itertools.count()
# Prints the id of the living node at an address; fails where there is none.
_NODE_ID = """
import sys
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5).values()
found = [n.node_id.hex() for n in nodes if n.node_manager_address == sys.argv[2] and n.state == 0]
print(*found)
sys.exit(not found)
"""


def why_not() -> str:
    """Why nodes cannot be simulated here; empty where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "simulated nodes need root (network namespaces)"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"simulated nodes need {', '.join(missing)} (package iproute2)" if missing else ""


@dataclass
class Node:
    """One simulated machine. `cpus` = Ray CPUs, the ranks it takes; `ray` = its raylet's process."""

    index: int
    cpus: int
    namespace: str
    address: str
    ray: subprocess.Popen[bytes] | None = None
    alive: bool = True


@dataclass
class SimulatedCluster:
    """A head without CPUs (node 0) and worker nodes 1, 2, ... with the given CPUs each.

    Args:
        nodes: Ray CPUs of each worker node.
        inter_rate, intra_rate: bytes/s of a node's link, and of all traffic inside a node; 0 = not shaped.
        ray: start raylets; False gives bare namespaces.
        env: added to every process.

    Raises:
        RaypackError: see `why_not`, or a step of the set-up failed; nothing is left behind.
    """

    nodes: Sequence[int]
    inter_rate: float = 0.0
    intra_rate: float = 0.0
    ray: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 90.0

    def __post_init__(self) -> None:
        reason = why_not()
        if reason:
            raise RaypackError(reason)
        self._name = f"{PREFIX}{os.getpid()}x{next(_serial)}"
        self._switch = f"{self._name}sw"
        self.members: list[Node] = []
        self.folder = Path(tempfile.gettempdir()) / self._name

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> SimulatedCluster:
        sweep()
        self.folder.mkdir()
        try:
            with _signals_as_exceptions():
                _ip("netns", "add", self._switch)
                _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
                _ip("-n", self._switch, "addr", "add", f"{NETWORK}.1/24", "dev", "br0")
                _ip("-n", self._switch, "link", "set", "br0", "up")
                self.add(0)
                started = [self._make(cpus) for cpus in self.nodes]
                for node in started:
                    self._wait_joined(node)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process in the namespaces and remove all that was made. Safe to call twice."""
        for node in reversed(self.members):
            self._end(node)
        _remove(self._switch)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- nodes --------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Node:
        return self.members[0]

    @property
    def address(self) -> str:
        """HOST:PORT of the Ray head."""
        return f"{self.head.address}:{PORT}"

    def node_id(self, index: int) -> str:
        """Ray's id of a living node."""
        found = self.output([sys.executable, "-c", _NODE_ID, self.address, self.members[index].address]).split()
        if not found:
            raise RaypackError(f"simulated node {index} is not part of the Ray cluster")
        return found[-1]

    def add(self, cpus: int) -> Node:
        """A further node; returns when its raylet has joined."""
        node = self._make(cpus)
        self._wait_joined(node)
        return node

    def _make(self, cpus: int) -> Node:
        index = len(self.members)
        node = Node(index, cpus, f"{self._name}n{index}", f"{NETWORK}.{10 + index}")
        self.members.append(node)
        self._network(node)
        if self.ray:
            self._start_ray(node)
        return node

    def kill(self, index: int) -> None:
        """SIGKILL everything on a node at once, as a lost machine."""
        self._end(self.members[index])

    def interface_bytes(self, index: int) -> dict[str, int]:
        """Bytes the kernel has sent from a node so far: `inter` over its link, `intra` over its loopback."""
        found = {}
        for scope, device in (("inter", "eth0"), ("intra", "lo")):
            path = f"/sys/class/net/{device}/statistics/tx_bytes"
            found[scope] = int(self.output(["cat", path], index=index))
        return found

    # -- processes ----------------------------------------------------------------------------------------------

    def popen(self, command: Sequence[str], index: int = 0, **options: object) -> subprocess.Popen[bytes]:
        """Start a command on a node (the head by default), in its own session."""
        node = self.members[index]
        env = {**os.environ, **self._environment(node), **dict(options.pop("env", {}) or {})}  # type: ignore[call-overload]
        inside = ["ip", "netns", "exec", node.namespace, *command]
        return subprocess.Popen(inside, env=env, start_new_session=True, **options)  # type: ignore[call-overload]

    def run(self, command: Sequence[str], index: int = 0, timeout: float = 300.0, **options: object) -> int:
        """Run a command on a node; its exit code."""
        process = self.popen(command, index, **options)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RaypackError(f"`{' '.join(command)}` did not end within {timeout:g} s on node {index}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)

    def output(self, command: Sequence[str], index: int = 0, timeout: float = 60.0) -> str:
        """Standard output of a command on a node; RaypackError where it fails."""
        process = self.popen(command, index, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            raise RaypackError(f"`{' '.join(command)}` did not end within {timeout:g} s on node {index}") from None
        text = out.decode(errors="replace")
        if process.returncode:
            raise RaypackError(f"`{' '.join(command)}` failed on node {index}: {text.strip()[-300:]}")
        return text

    # -- inside -------------------------------------------------------------------------------------------------

    def _environment(self, node: Node) -> dict[str, str]:
        return {
            "RAY_AUTH_MODE": "disabled",  # reachable from inside the namespaces only
            "RAY_ADDRESS": self.address if self.members else "",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TMPDIR": str(self.folder),
            **HEALTH_CHECK,
            **self.env,
        }

    def _network(self, node: Node) -> None:
        settings = SETTINGS / node.namespace
        settings.mkdir(parents=True)
        # Failed look-ups of the outside world cost seconds each; here they fail at once.
        (settings / "resolv.conf").write_text("", encoding="utf-8")
        (settings / "hosts").write_text(f"127.0.0.1 localhost\n{node.address} {node.namespace}\n", encoding="utf-8")
        inside, port = node.namespace, f"p{node.index}"
        _ip("netns", "add", inside)
        _ip("link", "add", "name", port, "netns", self._switch, "type", "veth", "peer", "name", "eth0", "netns", inside)
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", inside, "addr", "add", f"{node.address}/24", "dev", "eth0")
        _ip("-n", inside, "link", "set", "eth0", "up")
        _ip("-n", inside, "link", "set", "lo", "up")
        _ip("-n", inside, "route", "add", "default", "via", f"{NETWORK}.1")
        if self.inter_rate:
            _shape(inside, "eth0", self.inter_rate)
            _shape(self._switch, port, self.inter_rate)
        if self.intra_rate:
            _shape(inside, "lo", self.intra_rate)

    def _start_ray(self, node: Node) -> None:
        # A temporary folder of its own for each: raylets that share one race for socket names.
        options = ["--node-ip-address", node.address, "--num-cpus", str(node.cpus), "--block"]
        if node.index == 0:
            options += ["--head", "--port", str(PORT), "--dashboard-host", node.address]
            options += ["--temp-dir", str(self.folder / f"n{node.index}")]
        else:
            options += ["--address", self.address, "--temp-dir", str(self.folder / f"n{node.index}")]
        log = open(self.folder / f"ray-{node.index}.log", "wb")  # noqa: SIM115 - the process keeps it
        node.ray = self.popen(
            [_ray_command(), "start", *options], node.index, stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, cwd=str(self.folder),
        )  # fmt: skip
        log.close()

    def _wait_joined(self, node: Node) -> None:
        if node.ray is None:
            return
        deadline = time.monotonic() + self.start_seconds
        while not self._joined(node):
            if node.ray.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / f"ray-{node.index}.log").read_text(errors="replace")
                state = "ended" if node.ray.poll() is not None else f"did not join within {self.start_seconds:g} s"
                raise RaypackError(f"the raylet of simulated node {node.index} {state}: {text.strip()[-300:]}")
            time.sleep(0.5)

    def _joined(self, node: Node) -> bool:
        command = [sys.executable, "-c", _NODE_ID, self.address, node.address]
        return self.run(command, 0, 30, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0

    def _end(self, node: Node) -> None:
        node.alive = False
        _remove(node.namespace)
        if node.ray is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.ray.wait(10)


def sweep() -> None:
    """Remove what clusters of processes that are gone left behind."""
    for namespace in _namespaces():
        owner = namespace.removeprefix(PREFIX).split("x")[0]
        if namespace.startswith(PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(namespace)
            shutil.rmtree(Path(tempfile.gettempdir()) / namespace.rstrip("0123456789").rstrip("n"), ignore_errors=True)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _remove(namespace: str) -> None:
    """Kill all processes of a namespace and delete it."""
    if namespace in _namespaces():
        for _ in range(20):
            found = subprocess.run(
                ["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=10, check=False
            ).stdout.split()
            if not found:
                break
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=10, check=False)
    shutil.rmtree(SETTINGS / namespace, ignore_errors=True)


def _shape(namespace: str, device: str, rate: float) -> None:
    bits = f"{int(rate * 8)}bit"
    # Loopback hands over segments of up to 64 KB at once: the bucket must hold several.
    burst = "512kb" if device == "lo" else "128kb"
    _tc("-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", bits, "burst", burst, "latency", "100ms")


def _ip(*arguments: str) -> None:
    _checked("ip", *arguments)


def _tc(*arguments: str) -> None:
    _checked("tc", *arguments)


def _checked(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RaypackError(f"`{' '.join(command)}`: {done.stderr.strip()}")


def _ray_command() -> str:
    beside = Path(sys.executable).with_name("ray")
    return str(beside) if beside.exists() else "ray"


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that a terminated test leaves nothing behind."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        old = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
