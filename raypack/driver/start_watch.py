"""Bounds the start of the workers: Ray waits without end for a process that a node cannot bring up."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import ray
from ray._private import state

from raypack.errors import RaypackError

ASK_SECONDS = 1.0
WORKER_CLASS = "RayTrainWorker"


def living_workers() -> int:
    """Train workers of this run whose process is up.

    Raises:
        ray.exceptions.RaySystemError: the head does not answer.
    """
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    # Asked of the head itself: Ray's public way (`ray.util.state`) needs the dashboard.
    actors = state.actors(job_id=job, actor_state_name="ALIVE")
    return sum(actor["ActorClassName"] == WORKER_CLASS for actor in actors.values())


class StartWatch:
    """Context manager around the run, in the main thread: interrupts it where no worker has asked for a plan in time.

    Raises:
        RaypackError: on leaving, where the time was up.
    """

    def __init__(self, planner: Any, attempt: int, workers: int, timeout: float) -> None:
        """`planner` = the actor; `timeout` in seconds."""
        self._planner, self._attempt, self._workers, self._timeout = planner, attempt, workers, timeout
        self._over, self._late = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="raypack-start", daemon=True)

    def __enter__(self) -> StartWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=2 * ASK_SECONDS)
        if self._late:
            raise RaypackError(
                f"waited timeouts.start = {self._timeout:g} s for {self._workers} workers to start: are the cluster's "
                "CPUs or GPUs in use by others, or is it slow? Free them, or raise timeouts.start"
            ) from None

    def _watch(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._over.wait(ASK_SECONDS):
            with suppress(ray.exceptions.RayError):
                if ray.get(self._planner.begun.remote(self._attempt), timeout=ASK_SECONDS):
                    return
            if time.monotonic() > deadline:
                self._late = True
                os.kill(os.getpid(), signal.SIGINT)
                return
