"""A run in one record: what `summary.json` holds, and what the table at the end of a run shows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypack.config import first_fault
from raypack.errors import RaypackError
from raypack.observe.record import Bytes, StepRecord, comparable, rates
from raypack.observe.run_files import SUMMARY_FILE

SUMMARY_VERSION = 1


class Summary(BaseModel):
    """Figures over the effective steps, unless they say otherwise."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = Field(SUMMARY_VERSION, description="of this record")
    run: str = Field("", description="the run's name")
    stop_reason: str = Field("", description="why it ended; empty while it runs or where it was killed")
    notes: list[str] = Field([], description="what a reader must know of the figures, e.g. that nodes are simulated")
    steps: int = Field(0, description="effective steps")
    last_step: int | None = Field(None, description="the last effective step, from 0")
    skipped_steps: int = Field(0, description="of them, those whose update was skipped")
    replayed_steps: int = Field(0, description="records that a later attempt replaced")
    incomplete_steps: int = Field(0, description="records that not all ranks reported, of all attempts")
    restarts: int = Field(0, description="attempts after the first")
    ends: dict[int, str] = Field({}, description="why each attempt ended, where that is on file")
    worlds: list[int] = Field([], description="ranks, in the order of the attempts")
    first_loss: float | None = Field(None, description="of the first applied step")
    last_loss: float | None = Field(None, description="of the last applied step")
    heldout_losses: list[tuple[int, float]] = Field([], description="(step, loss)")
    seconds: float = Field(0.0, description="sum over the steps")
    mean_step_seconds: float | None = Field(None, description="mean")
    median_step_seconds: float | None = Field(None, description="median")
    wall_seconds: float | None = Field(None, description="from the run's start to the last record")
    goodput: float | None = Field(None, description="share of wall_seconds that went into effective steps")
    checkpoints: int = Field(0, description="begun, of all attempts")
    checkpoint_seconds: float = Field(0.0, description="that ranks stood still for them, after steps")
    tokens: int = Field(0, description="each counted once")
    tokens_per_second: float | None = Field(None, description="tokens / seconds")
    mfu: float | None = Field(None, description="share of the peak, weighted by seconds; null where unknown")
    peak_source: str = Field("", description="where the peak comes from")
    plan_wait_seconds: float = Field(0.0, description="median over the steps")
    plan_seconds: float = Field(0.0, description="median over the steps")
    plan_bound_ratio: float | None = Field(None, description="mean over the steps")
    memory_bytes: int | None = Field(None, description="peak of the fullest rank; null where not measured")
    policies: dict[str, int] = Field({}, description="steps by the policy of their plan")
    parent_widths: dict[int, int] = Field({}, description="samples by parent width")
    child_widths: dict[int, int] = Field({}, description="samples by child width")
    bytes: Bytes = Field({}, description="exchanges, by site and scope")
    collective_bytes: Bytes = Field({}, description="other collectives, by operation and scope")
    plan_step_seconds: float | None = Field(None, description="sum over the steps, by the cost model")
    static_step_seconds: float | None = Field(None, description="as plan_step_seconds, of the static plans")
    dynamic_step_seconds: float | None = Field(None, description="as plan_step_seconds, of the dynamic plans")
    bytes_static: Bytes = Field({}, description="as bytes, of the static plans")
    bytes_dynamic: Bytes = Field({}, description="as bytes, of the dynamic plans")
    phase_seconds: dict[str, float] = Field({}, description="mean a step by phase, over the ranks; they add up")
    exchange_seconds: dict[str, float] = Field({}, description="inside exchanges by site, summed over ranks and steps")

    @property
    def comparable_bytes(self) -> Bytes:
        """What `bytes_static` and `bytes_dynamic` count of their plans, of this run."""
        return comparable(self.bytes, self.collective_bytes)

    @property
    def exchange_rates(self) -> dict[str, float]:
        """Effective bytes/s of one rank by site."""
        return rates({**self.bytes, **self.collective_bytes}, self.exchange_seconds)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def summarise(
    records: Sequence[StepRecord],
    run: str = "",
    stop_reason: str = "",
    notes: Iterable[str] = (),
    ends: Mapping[int, str] | None = None,
) -> Summary:
    """Of resolved records (`steps.resolve`); `ends` as `attempts.ends_of`."""
    kept = [r for r in records if r.effective and r.sample_count > 0]
    losses = [r.loss for r in kept if r.applied and r.loss is not None]
    seconds = sum(r.seconds for r in kept)
    wall = max((r.run_seconds for r in records if r.run_seconds is not None), default=None)
    tokens = sum(r.tokens for r in kept)
    with_mfu = [r for r in kept if r.mfu is not None]
    ratios = [r.plan_bound_ratio for r in kept if r.plan_bound_ratio is not None]
    first_worlds = {r.attempt: r.world for r in sorted(records, key=lambda r: (r.attempt, -r.step))}
    return Summary(
        run=run,
        stop_reason=stop_reason,
        notes=list(notes),
        ends=dict(ends or {}),
        steps=len(kept),
        last_step=kept[-1].step if kept else None,
        skipped_steps=sum(not r.applied for r in kept),
        replayed_steps=sum(not r.effective for r in records),
        incomplete_steps=sum(not r.complete for r in records),
        restarts=max(0, len(first_worlds) - 1),
        worlds=[first_worlds[attempt] for attempt in sorted(first_worlds)],
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        heldout_losses=[(r.step, r.heldout_loss) for r in kept if r.heldout_loss is not None],
        seconds=seconds,
        mean_step_seconds=seconds / len(kept) if kept else None,
        median_step_seconds=statistics.median(r.seconds for r in kept) if kept else None,
        wall_seconds=wall,
        goodput=sum(r.seconds for r in records if r.effective) / wall if wall else None,
        checkpoints=sum(r.checkpointed for r in records),
        checkpoint_seconds=sum(r.checkpoint_seconds or 0.0 for r in records),
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        mfu=_weighted_mfu(with_mfu),
        peak_source=with_mfu[-1].peak_source if with_mfu else "",
        plan_wait_seconds=statistics.median([r.plan_wait_seconds for r in kept]) if kept else 0.0,
        plan_seconds=statistics.median([r.plan_seconds for r in kept]) if kept else 0.0,
        plan_bound_ratio=statistics.fmean(ratios) if ratios else None,
        memory_bytes=max((r.memory_bytes for r in kept if r.memory_bytes is not None), default=None),
        policies=dict(Counter(r.policy for r in kept)),
        parent_widths=_total(r.parent_widths for r in kept),
        child_widths=_total(r.child_widths for r in kept),
        bytes=_total_bytes(r.bytes for r in kept),
        collective_bytes=_total_bytes(r.collective_bytes for r in kept),
        plan_step_seconds=_sum([r.plan_step_seconds for r in kept]),
        static_step_seconds=_sum([r.static_step_seconds for r in kept]),
        dynamic_step_seconds=_sum([r.dynamic_step_seconds for r in kept]),
        bytes_static=_total_bytes(r.bytes_static for r in kept),
        bytes_dynamic=_total_bytes(r.bytes_dynamic for r in kept),
        phase_seconds={
            name: total / len(kept) for name, total in _total_seconds(r.phase_seconds for r in kept).items()
        },
        exchange_seconds=_total_seconds(r.exchange_seconds for r in kept),
    )


def read_summary(run_dir: str | Path) -> Summary | None:
    """The summary that the run left, None where it left none.

    Raises:
        RaypackError: the file is no summary, or a newer one.
    """
    path = Path(run_dir) / SUMMARY_FILE
    if not path.is_file():
        return None
    try:
        summary = Summary.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise RaypackError(f"{path}: {first_fault(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RaypackError(f"cannot read {path}: {error}") from None
    if summary.version > SUMMARY_VERSION:
        raise RaypackError(f"{path}: version = {summary.version}: this raypack reads up to {SUMMARY_VERSION}")
    return summary


def _weighted_mfu(records: Sequence[StepRecord]) -> float | None:
    seconds = sum(r.seconds for r in records)
    return sum((r.mfu or 0.0) * r.seconds for r in records) / seconds if seconds > 0 else None


def _sum(values: Sequence[float | None]) -> float | None:
    """None where one of them is unknown: a part of the steps would compare with nothing."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _total(counts: Iterable[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))


def _total_seconds(each: Iterable[dict[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for seconds in each:
        total.update(seconds)
    return dict(total)


def _total_bytes(each: Iterable[Bytes]) -> Bytes:
    total: Bytes = {}
    for sites in each:
        for site, scopes in sites.items():
            sums = total.setdefault(site, {"intra": 0, "inter": 0})
            for scope, count in scopes.items():
                sums[scope] = sums.get(scope, 0) + count
    return dict(sorted(total.items()))
