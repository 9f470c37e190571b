"""What ranks report, and the one typed record a step becomes (design section 7).

`RankReport` is what a rank sends after a step; rank 0's carries the `StepFacts` that are equal on all ranks.
`merge` makes a `StepRecord` of them: one JSON line of `steps.jsonl`, and all that metrics and tables ever read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from raypack.config import first_fault
from raypack.errors import RaypackError
from raypack.parallel.ledger import COLLECTIVES
from raypack.planning.load import SITES as PLANNED_SITES

RECORD_VERSION = 1

OUTSIDE_STEP = ("prepare", "evaluate", "checkpoint")
"""Phases that are no part of a step's seconds: the first runs beside it, the others after it."""

PLANNED_COLLECTIVES = tuple(op for op in COLLECTIVES if op in PLANNED_SITES)

K = TypeVar("K")

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
    applied: bool = True


@dataclass(frozen=True)
class RankReport:
    """What one rank did in a step.

    `tokens` = rows it held in the child layout, all rounds together. `busy_seconds` = its own computation,
    `wait_seconds` = the rest of the step but for the wait for the plan. `exchanged` and `collected` are its ledger's
    counters, `{(site, scope): bytes}` and `{(op, scope): bytes}`. `phases` = seconds by phase of the step, `layers` =
    seconds by `(kind of layer, direction)`, `exchange_seconds` = wall seconds inside exchanges by site (empty on
    devices that run them asynchronously).
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
    facts: StepFacts | None = None


class StepRecord(BaseModel):
    """One step of one attempt. Readers ignore keys they do not know, so newer records of this version still read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = Field(RECORD_VERSION, description="of this record")
    step: int = Field(ge=0, description="optimizer step, from 0")
    attempt: int = Field(ge=0, description="start of the worker group, counted over the run")
    time: float = Field(0.0, description="Unix seconds when the record was made")
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
    world: int = Field(0, description="ranks")
    nodes: int = Field(0, description="nodes that ranks reported from")
    rank_tokens: list[int | None] = Field([], description="by rank; null where a rank did not report")
    rank_busy_seconds: list[float | None] = Field([], description="by rank")
    rank_wait_seconds: list[float | None] = Field([], description="by rank")
    memory_bytes: int | None = Field(None, description="peak of the fullest rank; null where not measured")
    phase_seconds: dict[str, float] = Field({}, description="by phase, on its slowest rank")
    layer_seconds: dict[str, dict[str, float]] = Field(
        {}, description="by kind of layer and direction, on its slowest rank"
    )
    slowest_rank: int | None = Field(None, description="whose step took longest: these are its `seconds`")
    slowest_phase_seconds: dict[str, float] = Field({}, description="by phase, of the slowest rank")
    slowest_layer_seconds: dict[str, dict[str, float]] = Field(
        {}, description="by kind of layer and direction, of the slowest rank"
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
    def step_parts(self) -> dict[str, float]:
        """What the slowest rank's step is made of: seconds by phase and `other`, which add up to `seconds`.

        Empty in records of older versions. `phase_seconds` has each phase on a slowest rank of its own, so that their
        sum can be far above the step.
        """
        parts = {name: took for name, took in self.slowest_phase_seconds.items() if name not in OUTSIDE_STEP}
        return {**parts, "other": max(0.0, self.seconds - sum(parts.values()))} if parts else {}

    @property
    def checkpointed(self) -> bool:
        """Whether a checkpoint was saved after this step."""
        return "checkpoint" in self.phase_seconds

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
        return record


def merge(reports: Sequence[RankReport], facts: StepFacts | None = None, time: float = 0.0) -> StepRecord:
    """The record of one step of one attempt. Ranks that are missing make it incomplete, not wrong.

    Sums what ranks sent, takes the slowest rank's seconds; the step's own figures come from `facts`, by default the
    ones that rank 0's report carries.
    """
    first = reports[0]
    assert all((r.attempt, r.step, r.world) == (first.attempt, first.step, first.world) for r in reports)
    facts = facts or next((r.facts for r in reports if r.facts), None)
    by_rank: dict[int, RankReport] = {r.rank: r for r in reports}
    in_order = [by_rank.get(rank) for rank in range(first.world)]
    slowest = max(reports, key=lambda r: (r.seconds, -r.rank))
    seconds = slowest.seconds
    memory = [r.memory_bytes for r in reports if r.memory_bytes is not None]
    return StepRecord(
        step=first.step,
        attempt=first.attempt,
        time=time,
        complete=facts is not None and None not in in_order,
        seconds=seconds,
        plan_wait_seconds=max(r.plan_wait_seconds for r in reports),
        bytes=nested(r.exchanged for r in reports),
        collective_bytes=nested(r.collected for r in reports),
        world=first.world,
        nodes=len({r.node for r in reports}),
        rank_tokens=[r.tokens if r else None for r in in_order],
        rank_busy_seconds=[round(r.busy_seconds, 6) if r else None for r in in_order],
        rank_wait_seconds=[round(r.wait_seconds, 6) if r else None for r in in_order],
        memory_bytes=max(memory, default=None),
        phase_seconds=_slowest([r.phases for r in reports]),
        layer_seconds=_by_direction(_slowest([r.layers for r in reports])),
        slowest_rank=slowest.rank,
        slowest_phase_seconds=_slowest([slowest.phases]),
        slowest_layer_seconds=_by_direction(_slowest([slowest.layers])),
        exchange_seconds=_summed([r.exchange_seconds for r in reports]),
        **(_from_facts(facts, seconds, first.world) if facts else {"applied": False}),
    )


def _from_facts(facts: StepFacts, seconds: float, world: int) -> dict[str, Any]:
    fields = dict(vars(facts))
    peak = fields.pop("peak_flops")
    fields["mfu"] = facts.model_flops / (seconds * world * peak) if peak and seconds > 0 else None
    return fields


def nested(counters: Iterable[Mapping[tuple[str, str], int]]) -> Bytes:
    """Sum of `{(site, scope): bytes}` as `{site: {scope: bytes}}`, both scopes always there."""
    total: Bytes = {}
    for counter in counters:
        for (site, scope), count in counter.items():
            scopes = total.setdefault(site, {"intra": 0, "inter": 0})
            scopes[scope] = scopes.get(scope, 0) + int(count)
    return dict(sorted(total.items()))


def by_scope(bytes_: Bytes) -> dict[str, int]:
    """Sum over the sites."""
    return {scope: sum(scopes.get(scope, 0) for scopes in bytes_.values()) for scope in ("intra", "inter")}


def ids_digest(ids: Iterable[int]) -> str:
    """Of a step's sample ids, whatever their order: `sample_ids_digest`."""
    ordered = np.sort(np.fromiter(ids, dtype=np.int64))
    return hashlib.sha256(ordered.tobytes()).hexdigest()[:16]


def imbalance(values: Sequence[float | None]) -> float | None:
    """Largest / mean over the ranks that reported; None where there is nothing to compare."""
    known = [value for value in values if value is not None]
    total = sum(known)
    return max(known) * len(known) / total if total > 0 else None


def comparable(exchanged: Bytes, collected: Bytes) -> Bytes:
    """Bytes that depend on the plan: exchanges, and the collectives that plans are costed with."""
    return {**exchanged, **{op: collected[op] for op in PLANNED_COLLECTIVES if op in collected}}


def rates(sent: Bytes, seconds: Mapping[str, float]) -> dict[str, float]:
    """Effective bytes/s of one rank by site: sent to other ranks / time inside the exchange, waiting included."""
    return {site: sum(sent[site].values()) / took for site, took in seconds.items() if took > 0 and site in sent}


def _slowest(each_rank: Sequence[Mapping[K, float]]) -> dict[K, float]:
    names = dict.fromkeys(name for each in each_rank for name in each)
    return {name: round(max(each.get(name, 0.0) for each in each_rank), 6) for name in names}


def _summed(each_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in each_rank for name in each)
    return {name: round(sum(each.get(name, 0.0) for each in each_rank), 6) for name in names}


def _by_direction(seconds: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    made: dict[str, dict[str, float]] = {}
    for (kind, direction), value in seconds.items():
        made.setdefault(kind, {})[direction] = value
    return made
