"""What ranks report, and the one typed record a step becomes (docs/metrics.md).

`RankReport` is what a rank sends after a step; rank 0's carries the `StepFacts` that are equal on all ranks.
`collector.merge` makes a `StepRecord` of them: one JSON line of `steps.jsonl`, and all that metrics and tables ever
read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from raypack.config import first_fault
from raypack.errors import RaypackError
from raypack.plan.names import COLLECTIVES, PLANNED_SITES

RECORD_VERSION = 2

# A step's parts on the clock, in their order; `other` is what these leave of it.
PHASES = (
    "plan_wait", "agree", "forward", "backward", "exchange", "waiting", "gradient_reduce", "optimizer", "other",
)  # fmt: skip
RANK_FIGURES = ("tokens", "busy_seconds", "wait_seconds")
# Lists of so many ranks are as short as the rest of a record.
LISTED_MAX = 64
# Of a figure of many ranks: shares of the ranks that quantiles are kept at, and how many of the worst ranks.
SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)
WORST = 5
PLANNED_COLLECTIVES = tuple(op for op in COLLECTIVES if op in PLANNED_SITES)

Bytes = dict[str, dict[str, int]]
"""`{site or op: {"intra": bytes, "inter": bytes}}`"""


@dataclass(frozen=True)
class StepFacts:
    """What every rank knows alike of a step; rank 0 sends it.

    `loss` is the mean over the step's labels, `seconds` of planning are the planner's own. `peak_flops` = FLOP/s of
    one rank that MFU is taken against, None where unknown. Bytes are forward, backward and replays, of all ranks.
    `*_step_seconds` are the cost model's, of this plan and of the baselines' plans for the same samples.
    """

    epoch: int
    first_sample: int
    sample_count: int
    tokens: int
    labels: int
    rounds: int
    policy: str
    loss: float | None
    grad_norm: float | None
    model_flops: float
    sample_ids_digest: str
    plan_seconds: float = 0.0
    plan_bound_ratio: float | None = None
    peak_flops: float | None = None
    peak_source: str = ""
    plan_step_seconds: float | None = None
    static_step_seconds: float | None = None
    dynamic_step_seconds: float | None = None
    bytes_static: Bytes = field(default_factory=dict)
    bytes_dynamic: Bytes = field(default_factory=dict)
    parent_widths: Mapping[int, int] = field(default_factory=dict)
    child_widths: Mapping[int, int] = field(default_factory=dict)
    learning_rate: float | None = None
    heldout_loss: float | None = None
    expert_load: float | None = None
    expert_load_max: float | None = None
    applied: bool = True


@dataclass(frozen=True)
class RankReport:
    """What one rank did in a step.

    `tokens` = rows it held in the child layout, all rounds together. `busy_seconds` = its own computation,
    `wait_seconds` = the rest of the step but for the wait for the plan. `exchanged` and `collected` are its ledger's
    counters, `{(site, scope): bytes}` and `{(op, scope): bytes}`. `phases` = seconds by phase of the step, those inside
    exchanges apart (`exchange`), so that no second counts twice; `layers` = seconds by `(kind of layer, direction)`,
    exchanges included; `exchange_seconds` = wall seconds inside exchanges by site (empty on devices that run them
    asynchronously). `prepare_seconds` went by beside the step before, the evaluation and the checkpoint after the step:
    none of them is part of `seconds`; None = there was none. `host` = name of the rank's machine, "" where not known.
    """

    rank: int
    node: int
    world: int
    attempt: int
    step: int
    tokens: int
    seconds: float
    busy_seconds: float
    wait_seconds: float
    plan_wait_seconds: float
    exchanged: Mapping[tuple[str, str], int] = field(default_factory=dict)
    collected: Mapping[tuple[str, str], int] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[tuple[str, str], float] = field(default_factory=dict)
    exchange_seconds: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    prepare_seconds: float = 0.0
    evaluate_seconds: float | None = None
    checkpoint_seconds: float | None = None
    host: str = ""
    facts: StepFacts | None = None


class RankQuantiles(BaseModel):
    """A figure of many ranks in few numbers: over the ranks that reported."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    mean: float
    quantiles: tuple[float, float, float, float, float] = Field(description="at `SHARES` of the ranks")
    worst: tuple[tuple[int, str, float], ...] = Field(description="(rank, node, value), the largest first")

    @property
    def most(self) -> float:
        return self.quantiles[-1]


def rank_quantiles(values: Sequence[float | None], nodes: Sequence[str]) -> RankQuantiles | None:
    """Of values and nodes by rank, None where a rank did not report; None where no rank did."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    ranks = np.flatnonzero(np.isfinite(array))
    if not len(ranks):
        return None
    known = array[ranks]
    largest = np.argsort(-known, kind="stable")[:WORST]
    return RankQuantiles(
        mean=round(float(known.mean()), 6),
        quantiles=tuple(round(float(value), 6) for value in np.quantile(known, SHARES)),
        worst=tuple((int(ranks[i]), nodes[ranks[i]], round(float(known[i]), 6)) for i in largest),
    )


class StepRecord(BaseModel):
    """One step of one attempt. Readers ignore keys they do not know, so newer records of this version still read.

    Figures by rank are whole lists up to `LISTED_MAX` ranks; of larger worlds the file has their `rank_spread` only
    (`compact`). `across_ranks` reads both.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = Field(RECORD_VERSION, description="of this record")
    step: int = Field(ge=0, description="optimizer step, from 0")
    attempt: int = Field(ge=0, description="start of the worker group, counted over the run")
    time: float = Field(0.0, description="Unix seconds when the record was made")
    run_seconds: float | None = Field(None, description="since the run's start, when the record was made")
    epoch: int = Field(0, description="epoch of the first sample")
    first_sample: int = Field(0, description="place of the first sample in the epoch's order")
    sample_count: int = Field(0, description="samples of the step")
    effective: bool = Field(True, description="false where a later attempt replays the step")
    complete: bool = Field(True, description="all ranks reported")
    applied: bool = Field(True, description="false where all ranks skipped the update")
    loss: float | None = Field(None, description="mean over the step's labels; null where it is not finite")
    heldout_loss: float | None = Field(None, description="after this step, where it was taken")
    grad_norm: float | None = Field(None, description="global norm before clipping; null where it is not finite")
    learning_rate: float | None = Field(None, description="of this step")
    tokens: int = Field(0, description="tokens of the step, each counted once")
    labels: int = Field(0, description="valid labels, the loss's divisor")
    rounds: int = Field(0, description="rounds of the plan")
    policy: str = Field("given", description="policy that the plan came from")
    parent_widths: dict[int, int] = Field({}, description="samples by parent width")
    child_widths: dict[int, int] = Field({}, description="samples by child width")
    seconds: float = Field(0.0, description="of the step on its slowest rank")
    plan_wait_seconds: float = Field(0.0, description="longest wait for the plan")
    plan_seconds: float = Field(0.0, description="the planner's time for it")
    plan_bound_ratio: float | None = Field(None, description="planned seconds / area bound")
    mfu: float | None = Field(None, description="share of the peak; null where the peak is unknown")
    peak_source: str = Field("", description="where that peak comes from")
    model_flops: float = Field(0.0, description="forward and backward, without replays")
    bytes: Bytes = Field({}, description="exchanges, sent to other ranks, by site and scope")
    collective_bytes: Bytes = Field({}, description="other collectives, by operation and scope")
    plan_step_seconds: float | None = Field(None, description="of this plan, by the cost model")
    static_step_seconds: float | None = Field(None, description="of the static plan for the same samples, modelled")
    dynamic_step_seconds: float | None = Field(None, description="of the dynamic plan for the same samples, modelled")
    bytes_static: Bytes = Field({}, description="as bytes, of the static plan for the same samples")
    bytes_dynamic: Bytes = Field({}, description="as bytes, of the dynamic plan for the same samples")
    expert_load: float | None = Field(None, description="tokens of the fullest expert / mean, worst layer")
    expert_load_max: float | None = Field(None, description="what it would be if every token took the same experts")
    world: int = Field(0, description="ranks")
    nodes: int = Field(0, description="nodes that ranks reported from")
    node_first_ranks: dict[str, int] = Field({}, description="first rank of each node, by the node's name")
    rank_tokens: list[int | None] = Field([], description="by rank; null where a rank did not report")
    rank_busy_seconds: list[float | None] = Field([], description="by rank")
    rank_wait_seconds: list[float | None] = Field([], description="by rank")
    rank_spread: dict[str, RankQuantiles] = Field(
        {}, description="of the three lists, in place of them in large worlds"
    )
    memory_bytes: int | None = Field(None, description="peak of the fullest rank; null where not measured")
    phase_seconds: dict[str, float] = Field({}, description="by phase, means over the ranks; they add up to seconds")
    prepare_seconds: float = Field(0.0, description="frames and tokens, beside the step before, on the slowest rank")
    evaluate_seconds: float | None = Field(None, description="after the step, on the slowest rank; null where none was")
    checkpoint_seconds: float | None = Field(
        None,
        description="that ranks stood still after the step for a checkpoint, slowest rank; null where none was taken",
    )
    layer_seconds: dict[str, dict[str, float]] = Field(
        {}, description="by kind of layer and direction, means over the ranks, exchanges included"
    )
    exchange_seconds: dict[str, float] = Field({}, description="inside exchanges, by site or operation, of all ranks")
    sample_ids_digest: str = Field("", description="of the sample ids, sorted")

    @field_validator("loss", "heldout_loss", "grad_norm", "plan_bound_ratio", "mfu")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def checkpointed(self) -> bool:
        """Whether a checkpoint was saved after this step."""
        return self.checkpoint_seconds is not None

    def across_ranks(self, figure: str) -> RankQuantiles | None:
        """Of `tokens`, `busy_seconds` or `wait_seconds` over the ranks; None where no rank reported it."""
        if figure in self.rank_spread:
            return self.rank_spread[figure]
        return rank_quantiles(getattr(self, f"rank_{figure}"), self.rank_nodes())

    def imbalance(self, figure: str) -> float | None:
        """Largest / mean of `across_ranks`; None where there is nothing to compare."""
        found = self.across_ranks(figure)
        return found.most / found.mean if found is not None and found.mean > 0 else None

    def rank_nodes(self) -> list[str]:
        """Name of each rank's node, "" where that is not on record."""
        names, at = [""] * self.world, self.world
        for name, first in sorted(self.node_first_ranks.items(), key=lambda node: -node[1]):
            names[first:at] = [name] * (at - first)
            at = first
        return names

    def compact(self) -> StepRecord:
        """As it is kept: in worlds of more than `LISTED_MAX` ranks without what grows with them."""
        if self.world <= LISTED_MAX:
            return self
        quantiles = {name: found for name in RANK_FIGURES if (found := self.across_ranks(name)) is not None}
        lists: dict[str, list[float]] = {f"rank_{name}": [] for name in RANK_FIGURES}
        return self.model_copy(update={**lists, "node_first_ranks": {}, "rank_spread": quantiles})

    @property
    def comparable_bytes(self) -> Bytes:
        """What `bytes_static` and `bytes_dynamic` count of their plans, of this step."""
        return comparable(self.bytes, self.collective_bytes)

    @property
    def exchange_rates(self) -> dict[str, float]:
        """Effective bytes/s of one rank by site."""
        return rates({**self.bytes, **self.collective_bytes}, self.exchange_seconds)

    def to_json(self) -> str:
        """One line."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, line: str, where: str = "step record") -> StepRecord:
        """Read a record of this or an older version; keys that came later have their defaults.

        Raises:
            RaypackError: not JSON, a newer version, or a value of the wrong kind.
        """
        try:
            record = cls.model_validate_json(line)
        except ValidationError as error:
            raise RaypackError(f"{where}: {first_fault(error)}") from None
        if record.version > RECORD_VERSION:
            raise RaypackError(f"{where}: version = {record.version}: this raypack reads up to {RECORD_VERSION}")
        return record if record.version > 1 else _of_version_1(record)


def _of_version_1(record: StepRecord) -> StepRecord:
    """Its phases and layers were those of the slowest rank each, and added up to nothing."""
    slowest = record.phase_seconds
    after = {f"{name}_seconds": slowest.get(name) for name in ("evaluate", "checkpoint")}
    changed: dict[str, Any] = {
        **after,
        "prepare_seconds": slowest.get("prepare", 0.0),
        "phase_seconds": {},
        "layer_seconds": {},
    }
    return record.model_copy(update=changed)


def by_scope(bytes_: Bytes) -> dict[str, int]:
    """Sum over the sites."""
    return {scope: sum(scopes.get(scope, 0) for scopes in bytes_.values()) for scope in ("intra", "inter")}


def ids_digest(ids: Iterable[int]) -> str:
    """Of a step's sample ids, whatever their order: `sample_ids_digest`."""
    ordered = np.sort(np.fromiter(ids, dtype=np.int64))
    return hashlib.sha256(ordered.tobytes()).hexdigest()[:16]


def comparable(exchanged: Bytes, collected: Bytes) -> Bytes:
    """Bytes that depend on the plan: exchanges, and the collectives that plans are costed with."""
    return {**exchanged, **{op: collected[op] for op in PLANNED_COLLECTIVES if op in collected}}


def rates(sent: Bytes, seconds: Mapping[str, float]) -> dict[str, float]:
    """Effective bytes/s of one rank by site: sent to other ranks / time inside the exchange, waiting included."""
    return {site: sum(sent[site].values()) / took for site, took in seconds.items() if took > 0 and site in sent}
