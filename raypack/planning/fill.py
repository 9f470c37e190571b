"""Short samples into what wide packs leave free.

A pack takes its largest full part plus its largest cheap part. Where children hold long samples, other ranks of the
pack have cheap seconds to spare. One-rank samples put there cost only what they add to the largest full part; raising
it a little (`lift`) opens the cheap room of all other ranks at once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from operator import itemgetter

import numpy as np

from raypack.planning.neighbours import Candidates, finish, values
from raypack.planning.profiles import FULL, SPARSE_HELD
from raypack.planning.state import State

GAIN = 0.4
"""A sample joins a wide pack only where that takes less than this share of its own rank-seconds."""

MISSES = 12
"""Samples in a row that no pack wants before the rest is not asked."""


def fill(state: State, samples: list[int], lift: float) -> list[int]:
    """Put one-rank samples (longest first) where wide packs leave room.

    A rank takes the longest sample that fits and whose full part, against its cheap part, is no larger than that of the
    rank's room: so both are used up together. The roomiest rank goes first.

    Args:
        lift: seconds that the full part of a pack may grow by.

    Returns:
        Samples that stay out, longest first.
    """
    problem = state.problem
    single = problem.shapes.index(1, 1)
    one = problem.shapes.select(np.arange(len(problem.shapes)) == single)
    left = samples[::-1]
    lengths = problem.lengths[left]
    full, cheap = one.full_seconds(lengths)[:, 0], one.cheap_seconds(lengths)[:, 0]
    keys = list(zip(*(column.tolist() for column in (full, cheap, full / cheap, lengths)), strict=True))
    heap = _rooms(state, lift)
    while heap and left:
        spare, number, rank, free, tokens = heapq.heappop(heap)
        limits = (free, -spare, free / -spare, tokens)
        # All four grow with the length, so the longest that fits stands just before the first that does not.
        at = min(bisect_right(keys, limit, key=itemgetter(k)) for k, limit in enumerate(limits)) - 1
        if at < 0:
            continue
        amount = keys.pop(at)
        state.put(left.pop(at), (number, single, rank))
        heapq.heappush(heap, (spare + amount[1], number, rank, free - amount[0], tokens - amount[3]))
    return left[::-1]


def _rooms(state: State, lift: float) -> list[tuple[float, int, int, float, float]]:
    """Heap of (- spare cheap seconds, round, rank, spare full seconds, tokens up to the cap), ranks of wide packs."""
    found = list[tuple[float, int, int, float, float]]()
    for number in range(state.rounds):
        packs, load = state.packs(number), state.loads[number]
        cheap = packs.cheap - state.cheap(load)
        full = packs.full + lift - load[FULL]
        tokens = state.problem.cap - load[: SPARSE_HELD + 1].max(axis=0)
        for first, end in zip(packs.first.tolist(), packs.end.tolist(), strict=True):
            if end - first > 1:
                ranks = [rank for rank in range(first, end) if cheap[rank] > 0]
                found.extend((-float(cheap[r]), number, r, float(full[r]), float(tokens[r])) for r in ranks)
    heapq.heapify(found)
    return found


def share(state: State, samples: list[int], own: np.ndarray, limit: float) -> list[int]:
    """Give samples a wide pack as parent where that takes fewer rank-seconds than they need on their own.

    Their full attention then lies evenly on the whole pack and their tokens where its children leave room, and their
    exchange uses links that the long samples leave idle.

    Args:
        samples: longest first.
        own: rank-seconds of each on a block of its own.
        limit: seconds that the step must not exceed.

    Returns:
        Samples that stay out, in order.
    """
    choices = _wide_packs(state)
    world = state.problem.topology.world
    left, misses = [], 0
    before = float(finish(state).sum())
    for at, sample in enumerate(samples):
        if misses >= MISSES or not choices:
            left.extend(samples[at:])
            break
        found = Candidates(*(np.concatenate(part) for part in zip(*choices, strict=True)))
        price = values(state, sample, found)
        cost = np.where(price.seconds <= limit, price.mean * world - before, np.inf)
        best = int(cost.argmin())
        if cost[best] < GAIN * own[at]:
            state.put(sample, found.at(best))
            before = float(finish(state).sum())
            misses = 0
        else:
            left.append(sample)
            misses += 1
    return left


def _wide_packs(state: State) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Places (round, shape, pair) under a parent that is a whole pack across nodes, children inside nodes."""
    problem = state.problem
    shapes, node = problem.shapes, max(problem.topology.nodes)
    found = []
    for number in range(state.rounds):
        packs = state.packs(number)
        for first, end in zip(packs.first.tolist(), packs.end.tolist(), strict=True):
            if end - first <= node:
                continue
            for shape in np.flatnonzero((shapes.parent == end - first) & shapes.local).tolist():
                pair = np.flatnonzero(state.pairs(shape).parent_first == first)
                found.append((np.full(len(pair), number), np.full(len(pair), shape), pair))
    return found
