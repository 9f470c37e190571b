"""The objective of the local search, and a whole neighbourhood priced at once.

`values` gives the seconds of the step for every (round, parent, child) that a removed sample may take. Additions are
never negative, so the maximum over a pack that takes a sample in is the larger of the pack's old maximum and the new
one on the sample's parent alone: a candidate costs as much as its parent is wide.

Under sync = layer with prefetch, ranks drift less than a layer apart but a round's total must balance: the step is the
sum over rounds of the slowest pack; without prefetch, of the slowest full part plus the slowest cheap part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.planning.search.draft import Draft
from raypack.planning.search.profiles import EXCHANGE, FULL, SPARSE_HELD

MEAN_WEIGHT = 0.02
"""Weight of the ranks' mean finish beside the makespan: breaks ties towards less waiting."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Places for one sample: int64 arrays [candidates]. `shape` indexes `problem.shapes`, `pair` that shape's pairs."""

    round: np.ndarray
    shape: np.ndarray
    pair: np.ndarray

    def __len__(self) -> int:
        return len(self.round)

    def at(self, index: int) -> tuple[int, int, int]:
        return int(self.round[index]), int(self.shape[index]), int(self.pair[index])

    def select(self, mask: np.ndarray) -> Candidates:
        return Candidates(self.round[mask], self.shape[mask], self.pair[mask])


@dataclass(frozen=True, eq=False)
class Clocks:
    """float64 arrays. `before` [rounds + 1, world]: when a rank is free for a round (last row: when it is done);
    `start` [rounds, world]: when its pack starts there (0 where it has none)."""

    before: np.ndarray
    start: np.ndarray


def clocks(draft: Draft) -> Clocks:
    """The longest path through the rounds, packs meeting as in sync = step."""
    world = draft.problem.topology.world
    before, start = np.zeros((draft.rounds + 1, world)), np.zeros((draft.rounds, world))
    for number in range(draft.rounds):
        before[number + 1], start[number] = _advance(draft, number, before[number])
    return Clocks(before, start)


def finish(draft: Draft) -> np.ndarray:
    """float64 [world]: when each rank is done with all rounds, ranks meeting in packs."""
    return clocks(draft).before[-1]


def _advance(draft: Draft, number: int, clock: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clock after a round and start of each rank's pack, for clocks [..., world]."""
    packs = draft.packs(number)
    entered = np.zeros_like(clock)
    if not len(packs.first):
        return clock, entered
    edges = np.stack([packs.first, packs.end], axis=1).ravel()
    padded = np.concatenate([clock, clock[..., -1:]], axis=-1)
    starts = np.maximum.reduceat(padded, edges, axis=-1)[..., ::2]
    entered[..., packs.ranks] = starts[..., packs.at]
    after = clock.copy()
    after[..., packs.ranks] = entered[..., packs.ranks] + packs.seconds[packs.ranks]
    return after, entered


@dataclass(frozen=True, eq=False)
class Values:
    """float64 arrays [candidates]: seconds of the step (infinite over the cap), and the mean finish of all ranks."""

    seconds: np.ndarray
    mean: np.ndarray

    @property
    def objective(self) -> np.ndarray:
        return self.seconds + MEAN_WEIGHT * self.mean


def objective(draft: Draft) -> float:
    """Seconds of the step plus a little of the mean finish; infinite where a rank exceeds the cap."""
    if draft.loads[:, : SPARSE_HELD + 1].max() > draft.problem.cap * (1 + 1e-9):
        return float("inf")
    if draft.problem.meets_in_packs:
        done = finish(draft)
        return float(done.max() + MEAN_WEIGHT * done.mean())
    mean = sum(float(draft.packs(number).seconds.mean()) for number in range(draft.rounds))
    return sum(_round_seconds(draft, number) for number in range(draft.rounds)) + MEAN_WEIGHT * mean


def _round_seconds(draft: Draft, number: int) -> float:
    """A round that all ranks enter and leave together."""
    packs = draft.packs(number)
    if draft.problem.lockstep and len(packs.first):
        fixed = draft.problem.costs.cluster.round_seconds
        return float((packs.full + packs.exchange).max() + packs.cheap.max()) + fixed
    return float(packs.seconds.max())


def idlest(draft: Draft, candidates: Candidates, most: int) -> Candidates:
    """At most about `most` candidates: of every shape in every round those whose ranks are idle first."""
    if len(candidates) <= most:
        return candidates
    shapes = np.unique(candidates.shape)
    each = max(most // (len(shapes) * draft.rounds), 1)
    done = finish(draft) if draft.problem.meets_in_packs else None
    kept = []
    for shape in shapes.tolist():
        pairs = draft.pairs(shape)
        for number in range(draft.rounds):
            rows = np.flatnonzero((candidates.shape == shape) & (candidates.round == number))
            busy = draft.packs(number).seconds if done is None else done
            kept.append(rows[np.argsort(busy[pairs.parent_first[candidates.pair[rows]]], kind="stable")[:each]])
    return candidates.select(np.sort(np.concatenate(kept)))


def values(draft: Draft, sample: int, candidates: Candidates) -> Values:
    """The step with `sample`, which must be taken out, at each candidate."""
    seconds, mean = np.empty(len(candidates)), np.empty(len(candidates))
    widths = draft.problem.shapes.parent[candidates.shape]
    timing = clocks(draft) if draft.problem.meets_in_packs else None
    for width in np.unique(widths).tolist():
        rows = np.flatnonzero(widths == width)
        part = _values_of_width(draft, sample, candidates.select(rows), width, timing)
        seconds[rows], mean[rows] = part.seconds, part.mean
    return Values(seconds, mean)


def _values_of_width(draft: Draft, sample: int, candidates: Candidates, width: int, timing: Clocks | None) -> Values:
    number, parent_first, additions, which = _additions(draft, sample, candidates)
    ranks = parent_first[:, None] + np.arange(width)
    load = draft.loads.transpose(0, 2, 1)[number[:, None], ranks].transpose(2, 0, 1) + additions[:, which]
    over = load[: SPARSE_HELD + 1].max(axis=(0, 2)) > draft.problem.cap * (1 + 1e-9)
    packs = [draft.packs(k) for k in range(draft.rounds)]
    first, wide = draft.meeting(parent_first, np.full(len(number), width))
    end = np.maximum(np.stack([p.pack_end for p in packs])[number, parent_first], first + wide)
    first = np.minimum(np.stack([p.pack_first for p in packs])[number, parent_first], first)
    full = np.maximum(load[FULL].max(axis=1), np.stack([p.full for p in packs])[number, parent_first])
    cheap = np.maximum(draft.cheap(load).max(axis=1), np.stack([p.cheap for p in packs])[number, parent_first])
    exchange = load[EXCHANGE].max(axis=(0, 2)) + draft.pack_latency(first, end)
    exchange = np.maximum(exchange, np.stack([p.exchange for p in packs])[number, parent_first])
    fixed = draft.problem.costs.cluster.round_seconds
    if timing is None:
        found = _round_values(draft, number, first, end, full, cheap, exchange + fixed)
    else:
        start = timing.before[number[:, None], ranks].max(axis=1)
        start = np.maximum(start, timing.start[number, parent_first])
        found = _path_values(draft, timing, number, first, end, start + full + cheap + exchange + fixed)
    return Values(np.where(over, np.inf, found.seconds), found.mean)


def _additions(
    draft: Draft, sample: int, candidates: Candidates
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, first parent ranks, additions [ROWS, profiles, width] and the profile of each candidate."""
    parent_first = np.empty(len(candidates), dtype=np.int64)
    which = np.empty(len(candidates), dtype=np.int64)
    parts, base = [], 0
    for shape in np.unique(candidates.shape).tolist():
        rows = np.flatnonzero(candidates.shape == shape)
        pairs = draft.pairs(shape)
        parent_first[rows] = pairs.parent_first[candidates.pair[rows]]
        which[rows] = base + pairs.profile[candidates.pair[rows]]
        parts.append(pairs.additions(draft.amounts[sample]))
        base += len(pairs.stack)
    return candidates.round, parent_first, np.concatenate(parts).transpose(1, 0, 2), which


def _round_values(
    draft: Draft,
    number: np.ndarray,
    first: np.ndarray,
    end: np.ndarray,
    full: np.ndarray,
    cheap: np.ndarray,
    exchange: np.ndarray,
) -> Values:
    """A pack [first, end) takes these parts now, in rounds that all ranks enter and leave together."""
    packs = [draft.packs(k) for k in range(draft.rounds)]
    rounds = np.array([_round_seconds(draft, k) for k in range(draft.rounds)])
    seconds = np.stack([p.seconds for p in packs])
    before = np.concatenate([np.zeros((draft.rounds, 1)), np.cumsum(seconds, axis=1)], axis=1)
    grown = (full + cheap + exchange) * (end - first) - (before[number, end] - before[number, first])
    if draft.problem.lockstep:
        fixed = draft.problem.costs.cluster.round_seconds
        most_full = np.array([(p.full + p.exchange).max() for p in packs])[number] + fixed
        most_cheap = np.array([p.cheap.max() for p in packs])[number]
        mine = np.maximum(most_full, full + exchange) + np.maximum(most_cheap, cheap)
    else:
        mine = np.maximum(rounds[number], full + cheap + exchange)
    return Values(rounds.sum() - rounds[number] + mine, (seconds.sum() + grown) / seconds.shape[1])


def _path_values(
    draft: Draft, timing: Clocks, number: np.ndarray, first: np.ndarray, end: np.ndarray, finish: np.ndarray
) -> Values:
    """Let the later rounds follow a pack [first, end) that now finishes at `finish`."""
    seconds, mean = np.empty(len(number)), np.empty(len(number))
    rank = np.arange(timing.before.shape[1])
    for k in np.unique(number).tolist():
        rows = np.flatnonzero(number == k)
        later = [j for j in range(k + 1, draft.rounds) if len(draft.packs(j).first)]
        if not later:
            seconds[rows], mean[rows] = _last_pack(timing.before[k + 1], first[rows], end[rows], finish[rows])
            continue
        inside = (rank >= first[rows, None]) & (rank < end[rows, None])
        clock = np.where(inside, finish[rows, None], timing.before[k + 1])
        for j in later:
            clock, _ = _advance(draft, j, clock)
        seconds[rows], mean[rows] = clock.max(axis=1), clock.mean(axis=1)
    return Values(seconds, mean)


def _last_pack(
    clock: np.ndarray, first: np.ndarray, end: np.ndarray, finish: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Largest and mean of `clock` [world] where the ranks [first, end) are done at `finish` instead."""
    left = np.concatenate([[0.0], np.maximum.accumulate(clock)])
    right = np.concatenate([np.maximum.accumulate(clock[::-1])[::-1], [0.0]])
    total = np.concatenate([[0.0], np.cumsum(clock)])
    mean = (total[-1] - total[end] + total[first] + finish * (end - first)) / len(clock)
    return np.maximum(np.maximum(left[first], right[end]), finish), mean
