"""The observer: one small actor that all ranks report to, so that a run is one file, one summary, one scrape target.

Observing never stops training: ranks send and forget (`reporter`), queues are bounded, a fault here becomes one line on
standard error. /metrics is served by a thread, so a scrape waits for no report and no report for a scrape. All that it
knows is in the records: an observer that starts again goes on from them, counters included.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypack.errors import RaypackError
from raypack.files import replace_file
from raypack.observe.attempts import AttemptLog, ends_of, read_attempts
from raypack.observe.collector import Collector
from raypack.observe.exporter import Endpoint, Exporter
from raypack.observe.record import RankReport, StepRecord
from raypack.observe.reporter import Pulse, Receipt
from raypack.observe.run_files import ENDPOINT_FILE, STEPS_FILE, SUMMARY_FILE, steps_of
from raypack.observe.sinks import Aside, close_all
from raypack.observe.steps import StepLog, read_lines, resolve
from raypack.observe.summary import Summary, summarise

# Beside the runs, not in them: a file_sd pattern of Prometheus may have a star in its last part only.
DISCOVERY_FOLDER = ".prometheus"
HEAD_RESOURCE = "node:__internal_head__"
ANY_ADDRESS = ("", "0.0.0.0", "::")
NODE_ADDRESS = "node"
# Ray's text begins with what is the same for all deaths.
ENDED = re.compile(r"Worker exit detail: (.*?)\.(?= Some common causes|$)", re.MULTILINE)


class RunObserver:
    """Everything `Observer`, the actor, does; plain, so that it runs without Ray."""

    def __init__(
        self,
        run_dir: str,
        run_name: str,
        bind: str = "127.0.0.1",
        port: int = 0,
        notes: Sequence[str] = (),
        *,
        corpus: Mapping[str, int] | None = None,
        sinks: Sequence[str] = (),
        recent_max: int = 256,
    ) -> None:
        """Open the run directory (made if absent), go on from the records in it, and serve /metrics.

        Args:
            run_dir: absolute.
            run_name: the `run` label.
            bind, port: of /metrics; bind `node` = this node's own address; port 0 = any free one, written to
                `metrics.json` of the run directory.
            notes: lines that the summary repeats, such as that nodes are simulated.
            corpus: `{fate: documents of an epoch}`, see `metrics.FATES`.
            sinks: names of where records go too, see `sinks.find_sink`.
            recent_max: records kept for `since`.

        Raises:
            RaypackError: the directory cannot be written, its records cannot be read, the port is in use, or a sink
                cannot begin.
        """
        self.run_dir, self.run_name, self.notes = Path(run_dir), run_name, tuple(notes)
        self.instance = uuid.uuid4().hex
        self._collector = Collector()
        self._exporter = Exporter(run_name, steps_of(self.run_dir))
        self._started = time.time()
        self._reached: dict[int, int] = {}
        self._count = 0
        bind = _own_address() if bind == NODE_ADDRESS else bind
        self._endpoint = Endpoint(self._exporter, bind, port)
        try:
            with contextlib.suppress(OSError):  # StepLog says which path cannot be written, and why
                self.run_dir.mkdir(parents=True, exist_ok=True)
            self._log = StepLog(self.run_dir / STEPS_FILE)
            self._asides: list[Aside] = []
            self._go_on()
            for name in sinks:
                self._open(name)
        except RaypackError:
            self._endpoint.close()
            raise
        self._exporter.corpus(corpus or {})
        self._attempt = max(self._reached, default=-1)
        self._exporter.restarted(max(0, self._attempt))
        self._recent: deque[StepRecord] = deque(maxlen=recent_max)
        self._pulse: tuple[Pulse, float] | None = None
        self._summary: Summary | None = None
        self._announce(bind)

    def address(self) -> str:
        """URL of /metrics."""
        return self._url

    def begin(self, attempt: int, world: int) -> None:
        """A worker group of `world` ranks starts as `attempt` (from 0; `steps.next_attempt`)."""
        if attempt > self._attempt:
            if self._attempt >= 0:
                self._exporter.restarted(attempt - self._attempt)
            self._attempt = attempt
            self._keep(self._collector.begin(attempt))
            now = time.time()
            self._exporter.waits_since(now)
            self._exporter.attempt_started(now)
        self._exporter.world(world)

    def report(self, *reports: RankReport) -> Receipt:
        """Take in what a rank did in steps of one attempt, at least one; after `finish` no more. Never raises."""
        for report in reports if self._summary is None else ():
            try:
                if report.attempt > self._attempt:
                    self.begin(report.attempt, report.world)
                self._keep(self._collector.add(report))
            except Exception as error:
                _complain(error, report)
        return self.receipt(getattr(reports[-1], "attempt", self._attempt))

    def checkpoint_failed(self, attempt: int, reason: str) -> None:
        """A checkpoint of `attempt` could not be written."""
        AttemptLog(self.run_dir).add("unsaved", attempt, reason=reason)
        self._exporter.checkpoint_failed()

    def receipt(self, attempt: int) -> Receipt:
        """Which steps of `attempt` are on record."""
        return Receipt(self.instance, attempt, self._collector.settled(attempt))

    def beat(self, pulse: Pulse) -> None:
        """Take in where the run is."""
        self._pulse = pulse, time.monotonic()

    def pulse(self) -> tuple[Pulse, float] | None:
        """The last pulse, and the seconds since it came; None before the first."""
        return (self._pulse[0], time.monotonic() - self._pulse[1]) if self._pulse else None

    def latest(self) -> StepRecord | None:
        """The record made last."""
        return self._recent[-1] if self._recent else None

    def since(self, count: int) -> tuple[int, list[StepRecord]]:
        """Records after the first `count` ones, as far as they are still kept, and the new count."""
        new = min(self._count - count, len(self._recent))
        return self._count, list(self._recent)[len(self._recent) - new :] if new > 0 else []

    def finish(self, stop_reason: str = "finished") -> Summary:
        """Settle what is open, write `summary.json`, stop serving. A second call returns the same summary."""
        if self._summary is None:
            self._keep(self._collector.flush())
            self._log.close()
            records = resolve(read_lines(self.run_dir / STEPS_FILE))
            self._summary = summarise(records, self.run_name, stop_reason, self.notes, ends_of(self.run_dir))
            replace_file(self.run_dir / SUMMARY_FILE, self._summary.to_json())
            self._endpoint.close()
            self._write_endpoint(serving=False)
            self._discovery.unlink(missing_ok=True)
            close_all(self._asides)
        return self._summary

    def _open(self, name: str) -> None:
        """A sink that cannot begin stops a run that has not begun either; later it is only said."""
        try:
            self._asides.append(Aside(name, self.run_dir, self.run_name))
        except RaypackError as error:
            if not self._count:
                raise
            print(f"observer: {error}; the run goes on without it", file=sys.stderr, flush=True)

    def _go_on(self) -> None:
        """Take in what is on file, as if this observer had been there."""
        self._exporter.waits_since(time.time())
        for event in read_attempts(self.run_dir):
            if event.event == "started":
                self._exporter.attempt_started(event.time)
            self._exporter.checkpoint_failed(event.event == "unsaved")
        for record in read_lines(self.run_dir / STEPS_FILE):
            if record.run_seconds is not None:
                self._started = record.time - record.run_seconds
            with contextlib.suppress(RaypackError):  # a label of another version: this one has no series for it
                self._exporter.update(record, self._is_replayed(record))
            self._collector.known(record)
            self._note_reached(record)
            self._count += 1
        self._exporter.run_started(self._started)

    def _keep(self, records: Sequence[StepRecord]) -> None:
        for made in records:
            record = made.model_copy(update={"run_seconds": made.time - self._started})
            replayed = self._is_replayed(record)
            self._note_reached(record)
            self._count += 1
            self._recent.append(record.compact())
            sinks: list[StepLog | Exporter | Aside] = [self._log, self._exporter, *self._asides]
            for sink in sinks:
                try:
                    sink.update(record, replayed)
                except Exception as error:
                    _complain(error, record)

    def _is_replayed(self, record: StepRecord) -> bool:
        return any(record.step <= step for attempt, step in self._reached.items() if attempt < record.attempt)

    def _note_reached(self, record: StepRecord) -> None:
        self._reached[record.attempt] = max(record.step, self._reached.get(record.attempt, -1))

    def _announce(self, bind: str) -> None:
        self._host = _own_address() if bind in ANY_ADDRESS else bind
        target = f"[{self._host}]" if ":" in self._host else self._host
        self._url = f"http://{target}:{self._endpoint.port}/metrics"
        self._write_endpoint(serving=True)
        self._discovery = self.run_dir.parent / DISCOVERY_FOLDER / f"{self.run_dir.name}.json"
        self._discovery.parent.mkdir(exist_ok=True)
        entry = {"targets": [f"{target}:{self._endpoint.port}"], "labels": {"job": "raypack"}}
        replace_file(self._discovery, json.dumps([entry]) + "\n")

    def _write_endpoint(self, *, serving: bool) -> None:
        data = {"address": self._host, "port": self._endpoint.port, "url": self._url, "serving": serving}
        replace_file(self.run_dir / ENDPOINT_FILE, json.dumps(data, indent=2) + "\n")


class _Actor(RunObserver):
    """An actor whose constructor raises prints a traceback and dies; this one lives to say why in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._trouble = ""
        try:
            super().__init__(*args, **kwargs)
        except RaypackError as error:
            self._trouble = str(error)
            print(f"observer: {error}", file=sys.stderr, flush=True)

    def opened(self) -> tuple[str, str]:
        """URL of /metrics and "", or "" and why it could not open."""
        return ("", self._trouble) if self._trouble else (self.address(), "")

    def report(self, *reports: RankReport) -> Receipt:
        return Receipt("", reports[-1].attempt, ()) if self._trouble else super().report(*reports)

    def receipt(self, attempt: int) -> Receipt:
        return Receipt("", attempt, ()) if self._trouble else super().receipt(attempt)


Observer = ray.remote(max_restarts=16, max_pending_calls=4096)(_Actor)  # type: ignore[call-overload]
"""The actor; its constructor takes what `RunObserver`'s does."""


def start_observer(
    run_dir: str, run_name: str, bind: str, port: int, notes: Sequence[str], timeout: float, **more: Any
) -> tuple[Any, str]:
    """Start the actor on the head node; its handle and the URL of /metrics. Arguments as `RunObserver`'s.

    Raises:
        RaypackError: it did not start within `timeout` seconds, or could not open; see `RunObserver`.
    """
    actor = Observer.options(**head_node_options()).remote(run_dir, run_name, bind, port, notes, **more)
    try:
        url, trouble = ray.get(actor.opened.remote(), timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        ray.kill(actor)
        raise RaypackError(
            f"the observer actor did not start within timeouts.actor = {timeout:g} s; is the head node alive?"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise RaypackError(f"the observer actor died at its start: {cause_of_death(str(error))}") from None
    if trouble:
        ray.kill(actor)
        raise RaypackError(trouble)
    return actor, url


def head_node_options() -> dict[str, Any]:
    """Actor options for a helper of the run: no CPU, and on the head node where the cluster names one.

    Ray must be initialised.
    """
    options: dict[str, Any] = {"num_cpus": 0}
    for node in ray.nodes():
        if node["Alive"] and HEAD_RESOURCE in node["Resources"]:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return options


def _complain(error: Exception, about: object) -> None:
    print(f"observer: {error!r} on {about!r:.120}", file=sys.stderr, flush=True)


def _own_address() -> str:
    return ray.util.get_node_ip_address() if ray.is_initialized() else socket.gethostname()


def cause_of_death(text: str) -> str:
    """One line out of the text of a `RayActorError`: the exception of the constructor, or how the process ended."""
    lines = text.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    if frames:
        told = [line for line in lines[frames[-1] + 1 :] if not line.startswith("    ")]
        return " ".join(" ".join(told).split())
    ended = ENDED.search(text)
    how = ended[1] if ended else lines[0].rstrip(".")
    return f"{how}; its log is in Ray's session directory (logs/), the kernel's says whether memory ran out"
