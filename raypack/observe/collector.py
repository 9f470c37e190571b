"""Rank reports in, step records out: bounded, and indifferent to the order in which ranks report."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from raypack.observe.record import PHASES, Bytes, RankReport, StepFacts, StepRecord

K = TypeVar("K")


class Collector:
    """Holds the reports of steps that are not complete yet, at most `pending_max` steps."""

    def __init__(self, pending_max: int = 64, clock: Callable[[], float] = time.time) -> None:
        self.pending_max = pending_max
        self._clock = clock
        self._pending: OrderedDict[tuple[int, int], dict[int, RankReport]] = OrderedDict()
        self._done: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._attempt = -1

    def add(self, report: RankReport) -> list[StepRecord]:
        """Take in a report; return what is settled by it.

        That is its step once all ranks of the attempt have reported, and as incomplete: steps of earlier attempts
        (their missing ranks are gone), and the oldest step where more than `pending_max` wait. Reports of an earlier
        attempt, and of a step that is settled, come too late and are dropped.
        """
        settled = self.begin(report.attempt)
        key = (report.attempt, report.step)
        if report.attempt < self._attempt or key in self._done:
            return settled
        reports = self._pending.setdefault(key, {})
        reports[report.rank] = report
        if len(reports) == report.world:
            settled.append(self._settle(key))
        elif len(self._pending) > self.pending_max:
            settled.append(self._settle(next(iter(self._pending))))
        return settled

    def settled(self, attempt: int) -> tuple[int, ...]:
        """Steps of `attempt` that are on record, as far back as reports may wait."""
        return tuple(step for number, step in self._done if number == attempt)

    def known(self, record: StepRecord) -> None:
        """`record` is on file already: its reports, sent again, make no second one."""
        self._mark((record.attempt, record.step))
        self._attempt = max(self._attempt, record.attempt)

    def begin(self, attempt: int) -> list[StepRecord]:
        """Attempt `attempt` runs now: whatever earlier ones left open is settled as it is."""
        if attempt <= self._attempt:
            return []
        self._attempt = attempt
        return self.flush()

    def flush(self) -> list[StepRecord]:
        """Settle all open steps as they are."""
        return [self._settle(key) for key in list(self._pending)]

    def _settle(self, key: tuple[int, int]) -> StepRecord:
        reports = self._pending.pop(key)
        self._mark(key)
        return merge([reports[rank] for rank in sorted(reports)], time=self._clock())

    def _mark(self, key: tuple[int, int]) -> None:
        self._done[key] = None
        while len(self._done) > 2 * self.pending_max:
            self._done.popitem(last=False)


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
    seconds = max(r.seconds for r in reports)
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
        node_first_ranks=_node_first_ranks(reports),
        rank_tokens=[r.tokens if r else None for r in in_order],
        rank_busy_seconds=[round(r.busy_seconds, 6) if r else None for r in in_order],
        rank_wait_seconds=[round(r.wait_seconds, 6) if r else None for r in in_order],
        memory_bytes=_largest(r.memory_bytes for r in reports),
        phase_seconds=_phases(reports, seconds),
        prepare_seconds=round(max(r.prepare_seconds for r in reports), 6),
        evaluate_seconds=_largest(r.evaluate_seconds for r in reports),
        checkpoint_seconds=_largest(r.checkpoint_seconds for r in reports),
        layer_seconds=_by_direction(_means([r.layers for r in reports])),
        exchange_seconds=_rounded(_sums([r.exchange_seconds for r in reports])),
        **(_from_facts(facts, seconds, first.world) if facts else {"applied": False}),
    )


def nested(counters: Iterable[Mapping[tuple[str, str], int]]) -> Bytes:
    """Sum of `{(site, scope): bytes}` as `{site: {scope: bytes}}`, both scopes always there."""
    total: Bytes = {}
    for counter in counters:
        for (site, scope), count in counter.items():
            scopes = total.setdefault(site, {"intra": 0, "inter": 0})
            scopes[scope] = scopes.get(scope, 0) + int(count)
    return dict(sorted(total.items()))


def _from_facts(facts: StepFacts, seconds: float, world: int) -> dict[str, Any]:
    fields = dict(vars(facts))
    peak = fields.pop("peak_flops")
    fields["mfu"] = facts.model_flops / (seconds * world * peak) if peak and seconds > 0 else None
    return fields


def _phases(reports: Sequence[RankReport], seconds: float) -> dict[str, float]:
    """Means over the ranks that add up to the step's `seconds`, in the order of the step.

    All ranks meet where gradients are summed: the rank that is there last does not wait, so the least time that a rank
    takes there is the sum's own, and the rest is `waiting` for slower ranks.
    """
    means = _means([r.phases for r in reports])
    if "gradient_reduce" in means:
        own = round(min(r.phases.get("gradient_reduce", 0.0) for r in reports), 6)
        means["waiting"] = round(means["gradient_reduce"] - own, 6)
        means["gradient_reduce"] = own
    means["other"] = round(max(0.0, seconds - sum(means.values())), 6)
    order = [*(name for name in PHASES if name in means), *(name for name in means if name not in PHASES)]
    return {name: means[name] for name in order}


def _node_first_ranks(reports: Sequence[RankReport]) -> dict[str, int]:
    """Nodes by the names of their machines; simulated nodes of one machine are told apart by their numbers."""
    first: dict[int, RankReport] = {}
    for report in sorted(reports, key=lambda r: r.rank):
        first.setdefault(report.node, report)
    nodes_on = Counter(report.host for report in first.values())
    names = {
        node: report.host if report.host and nodes_on[report.host] == 1 else f"{report.host}/{node}".lstrip("/")
        for node, report in first.items()
    }
    return {names[node]: report.rank for node, report in first.items()}


def _sums(each_rank: Sequence[Mapping[K, float]]) -> dict[K, float]:
    total: dict[K, float] = {}
    for each in each_rank:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _means(each_rank: Sequence[Mapping[K, float]]) -> dict[K, float]:
    return _rounded({name: total / len(each_rank) for name, total in _sums(each_rank).items()})


def _rounded(seconds: Mapping[K, float]) -> dict[K, float]:
    return {name: round(value, 6) for name, value in seconds.items()}


def _largest(values: Iterable[Any]) -> Any:
    """None where none of them is known."""
    return max((value for value in values if value is not None), default=None)


def _by_direction(seconds: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    made: dict[str, dict[str, float]] = {}
    for (kind, direction), value in seconds.items():
        made.setdefault(kind, {})[direction] = value
    return made
