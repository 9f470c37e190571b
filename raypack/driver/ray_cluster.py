"""The Ray cluster of a run: the one that is there, or one of the run's own."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import ray

from raypack.config import Config
from raypack.errors import RaypackError

PROBE_SECONDS = 5.0
OBJECT_STORE_BYTES = 256 * 2**20


def address_of(config: Config) -> str:
    """Of the cluster to join: the one named, else the surrounding job's; "" = the run starts its own."""
    address = config.run.ray_address or os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


@contextmanager
def connected(config: Config) -> Iterator[str]:
    """Join the cluster of `run.ray_address` or of the surrounding job, else start a local one with a CPU per worker.

    Yields the address of its dashboard, "" where there is none.

    Raises:
        RaypackError: no Ray answers at the address, or it refuses this process.
    """
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(config.timeouts.start)
    # The controller's own polling: with the default of 2 s a failure and the end of a run are noticed that much later.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        address = address_of(config)
        dashboard = _join(address) if address else _start(config)
        signal.signal(signal.SIGTERM, on_terminate)  # Ray has put its own in its place
        yield dashboard
    finally:
        ray.shutdown()


def _start(config: Config) -> str:
    topology = config.topology
    cpus = max(1, math.ceil(topology.workers * topology.cpus_per_worker))
    # Nobody takes this machine away with notice; one process less to start.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # The raylet warns at four times as many processes as it expects to start at once, by default one a core.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(topology.workers + 4))
    try:
        context = ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,  # it takes the start 1.5 s or more, and then a share of the cores that train
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
        )
    except (OSError, ValueError, RuntimeError, SystemExit, ray.exceptions.RayError) as error:
        raise RaypackError(f"cannot start a local Ray: {_first_line(error)}") from None
    return context.dashboard_url or ""


def _join(address: str) -> str:
    if address.startswith("ray://"):
        raise RaypackError(
            f"run.ray_address = {address}: the driver does not run through Ray Client; use `ray job submit`, or "
            "run it on a node of the cluster with its HOST:PORT"
        )
    if address != "auto":
        _probe(address)
    try:
        context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, SystemExit, ray.exceptions.RayError) as error:
        refused = f"{_first_line(error)} (is it this Ray version, and do RAY_AUTH_MODE and the token agree?)"
        raise _no_cluster(address, refused) from None
    return context.dashboard_url or ""


def _probe(address: str) -> None:
    """`ray.init` would try for minutes, then end the process: ask first whether a Ray head listens there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RaypackError(f"run.ray_address = {address!r}: must be HOST:PORT of a Ray head, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from None
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return  # the probe has no certificate
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PROBE_SECONDS)
        except grpc.RpcError:
            raise _no_cluster(address, "something listens there, but no Ray head") from None


def _no_cluster(address: str, reason: str) -> RaypackError:
    return RaypackError(
        f"no Ray cluster at {address}: {reason}; start one, correct run.ray_address (or RAY_ADDRESS), or leave it "
        "empty for a local one"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
