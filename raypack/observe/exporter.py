"""The declared metrics as a Prometheus endpoint. Each exporter has a registry of its own: two in one process work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from raypack.errors import RaypackError
from raypack.observe.metrics import METRICS, POLICY, Metric
from raypack.observe.pace import Pace
from raypack.observe.record import PHASES, RANK_FIGURES, Bytes, StepRecord
from raypack.plan.names import COLLECTIVES
from raypack.version import build

RANK_GAUGES = tuple(f"raypack_rank_{figure}" for figure in RANK_FIGURES)


class Exporter:
    """Holds every metric of one run, fed record by record.

    Series of closed label sets exist from the start at 0, so that `increase()` sees their first change.
    """

    def __init__(self, run: str, steps: int = 0) -> None:
        """`steps` of the whole run; 0 = not known, and then no ETA."""
        # `_created` series would be a second, undeclared name for every counter.
        prometheus_client.disable_created_metrics()
        self.run = run
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {m.name: _make(m, self.registry) for m in METRICS}
        self._declared = {m.name: m for m in METRICS}
        self._world = 0
        self._nodes: list[str] = []
        self._pace = Pace(steps)
        self._series("raypack_build_info", *build().values()).set(1)
        for metric in METRICS:
            if metric.kind != "gauge":
                self._start_at_zero(metric)

    def update(self, record: StepRecord, replayed: bool) -> None:
        """Take in a record; `replayed` says that an earlier attempt had done the step.

        Raises:
            RaypackError: a label outside its set; everything else is taken in all the same.
        """
        self._progress(record, replayed)
        unknown: list[RaypackError] = []
        for part in (self._traffic, self._planning, self._time, self._ranks):
            try:
                part(record)
            except RaypackError as error:
                unknown.append(error)
        if unknown:
            raise unknown[0]

    def run_started(self, time: float) -> None:
        """The run's start, Unix seconds."""
        self._series("raypack_start_timestamp_seconds").set(time)

    def waits_since(self, time: float) -> None:
        """The ages of the next step and checkpoint count from `time`, Unix seconds."""
        for what in ("step", "checkpoint"):
            self._series(f"raypack_{what}_timestamp_seconds").set(time)

    def attempt_started(self, time: float) -> None:
        """The current attempt's start, Unix seconds."""
        self._series("raypack_attempt_timestamp_seconds").set(time)

    def checkpoint_failed(self, count: int = 1) -> None:
        self._series("raypack_checkpoint_failures_total").inc(count)

    def corpus(self, fates: Mapping[str, int]) -> None:
        """`{fate: documents of an epoch}`."""
        for fate, count in fates.items():
            self._series("raypack_corpus_samples", fate).set(count)

    def restarted(self, count: int = 1) -> None:
        self._series("raypack_restarts_total").inc(count)

    def world(self, size: int) -> None:
        """A new worker group of `size` ranks; series of ranks that are gone end."""
        self._series("raypack_world_size").set(size)
        self._on_nodes(self._nodes[:size])
        self._world = size

    def _progress(self, record: StepRecord, replayed: bool) -> None:
        self._series("raypack_step").set(record.step)
        self._series("raypack_step_seconds").observe(record.seconds)
        for name, value in (
            ("raypack_loss", record.loss if record.applied else None),
            ("raypack_heldout_loss", record.heldout_loss),
            ("raypack_grad_norm", record.grad_norm),
            ("raypack_learning_rate", record.learning_rate),
            ("raypack_mfu_ratio", record.mfu),
            ("raypack_expert_load_ratio", record.expert_load),
            ("raypack_expert_load_max_ratio", record.expert_load_max),
            ("raypack_memory_bytes", record.memory_bytes),
            ("raypack_step_timestamp_seconds", record.time),
            ("raypack_checkpoint_timestamp_seconds", record.time if record.checkpointed else None),
        ):
            if value is not None:
                self._series(name).set(value)
        self._series("raypack_tokens_total").inc(record.tokens)
        self._series("raypack_labels_total").inc(record.labels)
        self._series("raypack_model_flops_total").inc(record.model_flops)
        self._series("raypack_samples_total").inc(record.sample_count)
        self._series("raypack_samples_replayed_total").inc(record.sample_count if replayed else 0)
        skipped = record.complete and not record.applied
        self._series("raypack_steps_skipped_total").inc(skipped)
        # A step without any label is skipped too, and is no fault.
        self._series("raypack_steps_nonfinite_total").inc(skipped and record.labels > 0)
        self._series("raypack_steps_incomplete_total").inc(not record.complete)

    def _traffic(self, record: StepRecord) -> None:
        self._add_bytes("raypack_all_to_all_bytes_total", record.bytes)
        self._add_bytes("raypack_collective_bytes_total", record.collective_bytes)
        self._add_bytes("raypack_policy_bytes_total", record.bytes_static, "static")
        self._add_bytes("raypack_policy_bytes_total", record.bytes_dynamic, "dynamic")
        for site, seconds in record.exchange_seconds.items():
            kind = "collective" if site in COLLECTIVES else "all_to_all"
            self._series(f"raypack_{kind}_seconds_total", site).inc(seconds)

    def _add_bytes(self, name: str, counts: Bytes, *before: str) -> None:
        for first, scopes in counts.items():
            for scope, count in scopes.items():
                self._series(name, *before, first, scope).inc(count)

    def _planning(self, record: StepRecord) -> None:
        policy = record.policy if record.policy in (POLICY.values or ()) else "given"
        self._series("raypack_plans_total", policy).inc()
        self._series("raypack_rounds_total").inc(record.rounds)
        for block, widths in (("parent", record.parent_widths), ("child", record.child_widths)):
            for width, count in widths.items():
                self._series("raypack_block_samples_total", block, str(width)).inc(count)
        self._series("raypack_plan_seconds").set(record.plan_seconds)
        self._series("raypack_plan_wait_seconds").set(record.plan_wait_seconds)
        self._series("raypack_plan_late_seconds_total").inc(record.plan_wait_seconds)
        if record.plan_bound_ratio is not None:
            self._series("raypack_plan_bound_ratio").set(record.plan_bound_ratio)

        self._series("raypack_prepare_seconds").set(record.prepare_seconds)
        for plan, seconds in (
            ("own", record.plan_step_seconds),
            ("static", record.static_step_seconds),
            ("dynamic", record.dynamic_step_seconds),
        ):
            self._series("raypack_modelled_seconds_total", plan).inc(seconds or 0.0)

    def _time(self, record: StepRecord) -> None:
        self._series("raypack_checkpoints_total").inc(record.checkpointed)
        self._series("raypack_checkpoint_seconds_total").inc(record.checkpoint_seconds or 0.0)
        self._series("raypack_evaluate_seconds_total").inc(record.evaluate_seconds or 0.0)
        self._pace.add(record)
        self._series("raypack_effective_seconds").set(self._pace.effective_seconds)
        for name, value in (("goodput_ratio", self._pace.goodput), ("eta_seconds", self._pace.eta_seconds)):
            if value is not None:
                self._series(f"raypack_{name}").set(value)

    def _ranks(self, record: StepRecord) -> None:
        if record.world != self._world:
            self.world(record.world)
        self._series("raypack_nodes").set(record.nodes)
        self._on_nodes(record.rank_nodes())
        for name in RANK_GAUGES:
            for rank, value in enumerate(getattr(record, name.removeprefix("raypack_"))):
                if value is None:
                    self._forget(name, str(rank), self._nodes[rank])
                else:
                    self._series(name, str(rank), self._nodes[rank]).set(value)
        self._phases(record)

    def _on_nodes(self, nodes: list[str]) -> None:
        """Nodes by rank from now on; series of ranks that are gone, or have moved, end."""
        for rank, node in enumerate(self._nodes):
            if rank >= len(nodes) or nodes[rank] != node:
                for name in RANK_GAUGES:
                    self._forget(name, str(rank), node)
        self._nodes = nodes

    def _phases(self, record: StepRecord) -> None:
        phases = dict.fromkeys(PHASES, 0.0)
        for phase, seconds in record.phase_seconds.items():
            phases[phase if phase in phases else "other"] += seconds
        for phase, seconds in phases.items():
            self._series("raypack_phase_seconds", phase).set(seconds)
        for layer, directions in record.layer_seconds.items():
            for direction, seconds in directions.items():
                self._series("raypack_layer_seconds", layer, direction).set(seconds)

    def _series(self, name: str, *values: str) -> Any:
        for label, value in zip(self._declared[name].labels, values, strict=True):
            label.check(value)
        return self._metrics[name].labels(self.run, *values)

    def _forget(self, name: str, *values: str) -> None:
        try:
            self._metrics[name].remove(self.run, *values)
        except KeyError:
            return

    def _start_at_zero(self, metric: Metric) -> None:
        combinations: list[tuple[str, ...]] = [()]
        for label in metric.labels:
            combinations = [(*head, value) for head in combinations for value in label.values or ()]
        for values in combinations:
            self._series(metric.name, *values)


class Endpoint:
    """/metrics of one exporter, served by a thread of its own until `close`."""

    def __init__(self, exporter: Exporter, bind: str, port: int) -> None:
        """Serve on `bind`; `port` 0 = any free one.

        Raises:
            RaypackError: the port is in use, or the address is none of this machine's.
        """
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, bind, exporter.registry)
        except (OSError, OverflowError) as error:
            raise RaypackError(
                f"observe.port = {port}, observe.bind = {bind}: cannot serve /metrics there "
                f"({getattr(error, 'strerror', None) or error}); choose another address or port (0 = any free one)"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving; the thread is gone afterwards."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = list(metric.label_names)
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.help, labels, registry=registry, buckets=metric.buckets)
    if metric.kind == "counter":
        return Counter(metric.name, metric.help, labels, registry=registry)
    return Gauge(metric.name, metric.help, labels, registry=registry)
