"""Plain processes around the train loop: ranks on gloo, a planner, and how they talk to the test that kills them.

Everything inside a rank is the product's; only Ray's part is played here: a planner process that answers on a socket, a
server that takes reports as the observer does, and a thread that hears when to leave.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.errors import Leaving, RaypackError
from raypack.plan.plan import Plan, StreamState
from raypack.plan.topology import Topology
from raypack.planning.steps import PlannedStep, StepPlanner
from raypack.training.loop import Job, Seat, train
from raypack.training.progress import Progress

LEFT, FAILED = 10, 11  # exit codes


def serve_plans(config: Config, corpus: str, socket: str) -> None:
    """The planner process: one thread a connection, no state between requests."""
    planner = StepPlanner(config, Corpus.open(corpus))
    lock, made = threading.Lock(), {}

    def plan(nodes: tuple[int, ...], step: int | None, before: StreamState | None) -> Any:
        topology = Topology(nodes)
        return planner.held_out_plan(topology) if step is None else planner.plan(topology, step, before)

    def answer(connection: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                asked = connection.recv()
                with lock:
                    if asked not in made:
                        made[asked] = plan(*asked)
                connection.send(made[asked])

    with suppress(FileNotFoundError):
        os.unlink(socket)
    with Listener(socket, "AF_UNIX") as listener:
        while True:
            threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()


class SocketPlans:
    """Asks the planner process; where it died meanwhile, whoever took its place."""

    def __init__(self, socket: str, topology: Topology, timeout: float) -> None:
        self._socket, self._nodes, self._timeout = socket, topology.nodes, timeout

    def step(self, step: int, before: StreamState) -> PlannedStep:
        planned: PlannedStep = self._ask(step, before)
        return planned

    def held_out(self) -> Plan | None:
        plan: Plan | None = self._ask(None, None)
        return plan

    def _ask(self, step: int | None, before: StreamState | None) -> Any:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            with suppress(EOFError, OSError), Client(self._socket, "AF_UNIX") as connection:
                connection.send((self._nodes, step, before))
                if connection.poll(max(0.0, deadline - time.monotonic())):
                    return connection.recv()
            time.sleep(0.05)
        raise RaypackError(f"waited {self._timeout:g} s for the plan of step {step}")


class Office:
    """A rank's line to the test: reports and questions go out, the word to leave comes in."""

    def __init__(self, socket: str, rank: int, progress: Progress) -> None:
        self._line, self._lock = Client(socket, "AF_UNIX"), threading.Lock()
        self._line.send(("rank", rank, progress.attempt))
        self._ear = Client(socket, "AF_UNIX")
        self._ear.send(("ear", rank, progress.attempt))
        threading.Thread(target=self._listen, args=(progress,), daemon=True).start()

    def _listen(self, progress: Progress) -> None:
        with suppress(EOFError, OSError):
            while True:
                progress.asked = self._ear.recv()

    def send(self, report: Any) -> None:
        with self._lock:
            self._line.send(("report", report))

    def wait_on_record(self, attempt: int, step: int) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with self._lock:
                self._line.send(("settled", attempt))
                if step in self._line.recv():
                    return
            time.sleep(0.02)


def run_rank(
    rank: int, nodes: tuple[int, ...], job: Job, attempt: int, store: str, planner: str, office: str, log: str
) -> None:
    """One rank of one attempt, to its end. Exit code 0 = the run is done, LEFT, or FAILED."""
    sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 - for as long as the process lives
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    code, config = FAILED, job.config
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=sum(nodes),
            timeout=timedelta(seconds=config.timeouts.collective),
        )  # fmt: skip
        progress = Progress(attempt=attempt)
        line = Office(office, rank, progress)
        seat = Seat(
            topology=Topology(nodes),
            device=torch.device("cpu"),
            progress=progress,
            plans=lambda topology: SocketPlans(planner, topology, config.timeouts.plan),
            send=line.send,
            flush=lambda: None,
            on_record=lambda step: line.wait_on_record(attempt, step),
        )
        train(job, seat)
        code = 0
    except Leaving:
        code = LEFT
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may wait for a rank that was killed


def corpus_of(folder: Path) -> Path:
    """Documents for the runs of these tests."""
    from tests.job_runs import tiny_corpus

    return tiny_corpus(folder / "corpus", documents=150, longest=400)
