"""Every metric of a run, declared once: the exporter, the table of docs/metrics.md and the dashboards read this list.

Rules, checked when a metric is defined: names match `raypack_[a-z0-9_]+` and end in their base unit; counters, and
only they, end in `_total`; labels come from closed sets, are small integers (`rank`, `width`), or names of which a run
has few (`node`: as many as machines). Every metric also carries `run`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from raypack.errors import RaypackError
from raypack.observe.record import PHASES
from raypack.plan.names import COLLECTIVES, EXCHANGE_SITES, LAYER_KINDS, OTHER_KIND, PLANNED_SITES, POLICIES, SCOPES

RUN_LABEL = "run"
LAYERS = ("embed", *LAYER_KINDS.values(), OTHER_KIND, "head")
DIRECTIONS = ("forward", "backward")
FATES = ("kept", "truncated", "skipped_long", "skipped_short")
UNITS = ("", "bytes", "seconds", "ratio", "tokens")
_NAME = re.compile(r"raypack_[a-z0-9]+(_[a-z0-9]+)*")
_LABEL = re.compile(r"[a-z]+(_[a-z]+)*")
# Host names, versions: nothing that could make a series of every step.
_TEXT = re.compile(r"[\w.:/+-]{0,253}")


@dataclass(frozen=True)
class Label:
    """A label and its closed set; `values` None = integers from 0, no more than there are ranks; with `text`, names."""

    name: str
    values: tuple[str, ...] | None = None
    text: bool = False

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name) or self.name in (RUN_LABEL, "le"):
            raise RaypackError(f"label {self.name!r}: lower-case words joined by _, and neither run nor le")

    def check(self, value: str) -> None:
        """Raises RaypackError for a value outside the set."""
        if self.values is not None:
            allowed = value in self.values
        else:
            allowed = _TEXT.fullmatch(value) is not None if self.text else value.isdecimal()
        if not allowed:
            raise RaypackError(f"label {self.name} = {value!r}: one of {self.described}")

    @property
    def described(self) -> str:
        return ", ".join(self.values) if self.values is not None else "names" if self.text else "integers"


@dataclass(frozen=True)
class Metric:
    """One declaration. `buckets` (upper bounds) for histograms only."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RaypackError(f"metric name {self.name!r}: must match {_NAME.pattern}, e.g. raypack_train_loss")
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise RaypackError(f"metric {self.name}, a {self.kind}: counters end in _total and nothing else does")
        if self.unit not in UNITS:
            raise RaypackError(f"metric {self.name}: unit = {self.unit!r}: base units only: {', '.join(UNITS[1:])}")
        if self.unit and not self.name.removesuffix("_total").endswith(f"_{self.unit}"):
            raise RaypackError(f"metric {self.name}: the name must end in its unit, _{self.unit}")
        if (self.kind == "histogram") != bool(self.buckets):
            raise RaypackError(f"metric {self.name}, a {self.kind}: buckets belong to histograms, and they need them")
        if len({label.name for label in self.labels}) != len(self.labels):
            raise RaypackError(f"metric {self.name}: the same label twice")
        if not self.help:
            raise RaypackError(f"metric {self.name}: needs a help text")

    @property
    def label_names(self) -> tuple[str, ...]:
        return (RUN_LABEL, *(label.name for label in self.labels))


SITE = Label("site", EXCHANGE_SITES)
OP = Label("op", COLLECTIVES)
SCOPE = Label("scope", SCOPES)
RANK = Label("rank")
NODE = Label("node", text=True)
BUILD = tuple(Label(name, text=True) for name in ("version", "code", "torch", "ray", "python"))
PLAN = Label("plan", ("own", "static", "dynamic"))
POLICY = Label("policy", (*POLICIES, "given"))
BASELINE = Label("policy", ("static", "dynamic"))
BLOCK = Label("block", ("parent", "child"))
WIDTH = Label("width")
PHASE = Label("phase", PHASES)
PLANNED_SITE = Label("site", tuple(dict.fromkeys((*EXCHANGE_SITES, *PLANNED_SITES))))
LAYER = Label("layer", LAYERS)
DIRECTION = Label("direction", DIRECTIONS)
FATE = Label("fate", FATES)

# Powers of two and their halves, so that one list serves local trials and steps of minutes.
STEP_BUCKETS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0)

METRICS: tuple[Metric, ...] = (
    Metric("raypack_step", "gauge", "", "Last step that was recorded, from 0"),
    Metric("raypack_step_seconds", "histogram", "seconds", "Seconds of a step on its slowest rank", (), STEP_BUCKETS),
    Metric(
        "raypack_step_timestamp_seconds", "gauge", "seconds",
        "Unix time of the last step; before it, of the attempt's start",
    ),
    Metric("raypack_loss", "gauge", "", "Mean loss over the labels of the last applied step"),
    Metric("raypack_heldout_loss", "gauge", "", "Last held-out loss"),
    Metric("raypack_grad_norm", "gauge", "", "Global gradient norm of the last step, before clipping"),
    Metric("raypack_learning_rate", "gauge", "", "Learning rate of the last step"),
    Metric("raypack_mfu_ratio", "gauge", "ratio", "Model FLOP/s of the last step over the peak; absent where unknown"),
    Metric("raypack_tokens_total", "counter", "tokens", "Tokens trained on, each once whatever its block width"),
    Metric("raypack_labels_total", "counter", "", "Labels that the loss was taken over"),
    Metric("raypack_samples_total", "counter", "", "Samples trained on, replays included"),
    Metric("raypack_samples_replayed_total", "counter", "", "Samples of steps that an earlier attempt had done"),
    Metric("raypack_model_flops_total", "counter", "", "Model FLOPs, forward and backward, without replays"),
    Metric(
        "raypack_all_to_all_bytes_total", "counter", "bytes",
        "Exchanges, sent to other ranks: forward, backward and replays", (SITE, SCOPE),
    ),
    Metric(
        "raypack_collective_bytes_total", "counter", "bytes",
        "Other collectives: state_gather, kv_gather and conv_halo as handed to each other rank; gradient_reduce, "
        "parameter_gather and metric_reduce by the ring formula, to the next rank; the rest (tiny) not at all",
        (OP, SCOPE),
    ),
    Metric(
        "raypack_policy_bytes_total", "counter", "bytes",
        "Exchange bytes that the plan of this policy would have sent for the same samples",
        (BASELINE, PLANNED_SITE, SCOPE),
    ),
    Metric(
        "raypack_all_to_all_seconds_total", "counter", "seconds",
        "Time of ranks inside exchanges, added up: bytes over it = effective rate of a rank; 0 on GPUs", (SITE,),
    ),
    Metric(
        "raypack_collective_seconds_total", "counter", "seconds",
        "The same for other collectives, those that are timed", (OP,),
    ),
    Metric(
        "raypack_modelled_seconds_total", "counter", "seconds",
        "Step seconds by the cost model: of the run's own plans, and of static and dynamic plans for the same samples",
        (PLAN,),
    ),
    Metric("raypack_plans_total", "counter", "", "Steps by the policy their plan came from", (POLICY,)),
    Metric("raypack_rounds_total", "counter", "", "Rounds run"),
    Metric("raypack_block_samples_total", "counter", "", "Samples by width of their parent and child", (BLOCK, WIDTH)),
    Metric("raypack_plan_seconds", "gauge", "seconds", "Time the planner took for the last step's plan"),
    Metric("raypack_plan_wait_seconds", "gauge", "seconds", "Longest wait of a rank for the last step's plan"),
    Metric("raypack_plan_late_seconds_total", "counter", "seconds", "Time that steps waited for their plans"),
    Metric(
        "raypack_prepare_seconds", "gauge", "seconds",
        "Frames and tokens for the last step on its slowest rank, beside the step before",
    ),
    Metric("raypack_plan_bound_ratio", "gauge", "ratio", "Planned seconds over the area bound, last step"),
    Metric(
        "raypack_phase_seconds", "gauge", "seconds",
        "Phases of the last step, means over the ranks; they add up to the step", (PHASE,),
    ),
    Metric(
        "raypack_layer_seconds", "gauge", "seconds",
        "Layers of one kind in the last step, exchanges included, means over the ranks", (LAYER, DIRECTION),
    ),
    Metric("raypack_rank_tokens", "gauge", "tokens", "Tokens in the child layout, last step", (RANK, NODE)),
    Metric("raypack_rank_busy_seconds", "gauge", "seconds", "Own computation, last step", (RANK, NODE)),
    Metric("raypack_rank_wait_seconds", "gauge", "seconds", "Waiting for other ranks, last step", (RANK, NODE)),
    Metric("raypack_expert_load_ratio", "gauge", "ratio", "Tokens of the fullest expert over the mean, worst layer"),
    Metric(
        "raypack_expert_load_max_ratio", "gauge", "ratio",
        "What that would be if every token took the same experts: experts over active ones",
    ),
    Metric("raypack_memory_bytes", "gauge", "bytes", "Peak memory of the fullest rank; absent where not measured"),
    Metric("raypack_world_size", "gauge", "", "Ranks of the current attempt"),
    Metric("raypack_nodes", "gauge", "", "Nodes that ranks reported from in the last step"),
    Metric("raypack_restarts_total", "counter", "", "Starts of the worker group after the first"),
    Metric("raypack_steps_skipped_total", "counter", "", "Steps whose update all ranks skipped"),
    Metric("raypack_steps_nonfinite_total", "counter", "", "Steps skipped because loss or gradient was not finite"),
    Metric("raypack_steps_incomplete_total", "counter", "", "Steps that not all ranks reported"),
    Metric(
        "raypack_checkpoint_timestamp_seconds", "gauge", "seconds",
        "Unix time of the last checkpoint; before it, of the attempt's start",
    ),
    Metric("raypack_checkpoints_total", "counter", "", "Checkpoints begun"),
    Metric("raypack_checkpoint_failures_total", "counter", "", "Checkpoints that could not be written"),
    Metric(
        "raypack_checkpoint_seconds_total", "counter", "seconds",
        "Time that ranks stood still after steps for checkpoints, slowest rank; the writing goes on beside the steps",
    ),
    Metric("raypack_evaluate_seconds_total", "counter", "seconds", "Time after steps for held-out losses"),
    Metric(
        "raypack_start_timestamp_seconds", "gauge", "seconds",
        "Unix time of the run's start: when its first observer was there",
    ),
    Metric("raypack_attempt_timestamp_seconds", "gauge", "seconds", "Unix time of the current attempt's start"),
    Metric(
        "raypack_effective_seconds", "gauge", "seconds",
        "Seconds of the steps that count; falls where a new attempt does steps again",
    ),
    Metric(
        "raypack_goodput_ratio", "gauge", "ratio",
        "Share of the wall time from the run's start to its last step that went into steps that count",
    ),
    Metric(
        "raypack_eta_seconds", "gauge", "seconds",
        "Time to the end of the run's last step at the pace of the last steps; absent where the steps are not known",
    ),
    Metric("raypack_build_info", "gauge", "", "1; what the observer runs", BUILD),
    Metric("raypack_corpus_samples", "gauge", "", "Documents of an epoch by what the length rules did", (FATE,)),
)  # fmt: skip


def table() -> str:
    """The declarations as a Markdown table, for docs/metrics.md."""
    rows = ["| name | kind | labels besides `run` | what it is |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label.name}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"


def label_table() -> str:
    """The labels and their closed sets as a Markdown table."""
    seen: dict[Label, list[str]] = {}
    for metric in METRICS:
        for label in metric.labels:
            seen.setdefault(label, []).append(f"`{metric.name}`")
    rows = ["| label | values | of |", "|---|---|---|"]
    for label, users in seen.items():
        listed = label.described if label.values is None else ", ".join(f"`{value}`" for value in label.values)
        rows.append(f"| `{label.name}` | {listed} | {', '.join(users)} |")
    return "\n".join(rows) + "\n"
