"""Samples with parent = child, already placed on blocks, cut into rounds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from raypack.planning.greedy import first_fit
from raypack.planning.problem import Problem


def capacity(problem: Problem, width: int) -> int:
    """Tokens that a block of `width` can hold in one round where parent = child = the block."""
    equal = problem.equal_shapes
    at = int(np.flatnonzero(equal.parent == width)[0])
    full, sparse, tokens = float(equal.full_held[at]), float(equal.sparse_held[at]), problem.cap * width
    if sparse:
        tokens = min(tokens, int(problem.cap / sparse * (1 + 1e-12)))
    if full:
        step = width if equal.padded else 1  # padded: one token more may be one on every rank
        tokens = min(tokens, int(problem.cap / (full * step) * (1 + 1e-12)) * step)
    return tokens


def stack_rounds(
    problem: Problem, lengths: np.ndarray, first: np.ndarray, widths: np.ndarray, depth: np.ndarray
) -> np.ndarray:
    """One width per pack and round, widest first: no rank waits inside a pack, at the price of more rounds.

    Args:
        lengths, first, widths: of each sample and its block.
        depth: int64 [world], rounds that each rank has used before; updated in place.

    Returns:
        Round of each sample.
    """
    rounds = np.empty(len(first), dtype=np.int64)
    order = np.lexsort((np.arange(len(first)), first, -widths))
    capacities = {int(w): capacity(problem, int(w)) for w in np.unique(widths)}
    edges = np.flatnonzero(np.diff(first[order], prepend=-1) | np.diff(widths[order], prepend=-1))
    for start, end in pairwise([*edges.tolist(), len(order)]):
        items = order[start:end]
        width, at = int(widths[items[0]]), int(first[items[0]])
        base = int(depth[at : at + width].max())
        bins = first_fit(lengths[items].tolist(), capacities[width])
        rounds[items] = base + np.array(bins)
        depth[at : at + width] = base + max(bins) + 1
    return rounds


def mix_rounds(problem: Problem, lengths: np.ndarray, first: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Widths side by side and nested in each round, first fit by the memory of every rank. Round of each sample."""
    equal = problem.equal_shapes
    column = np.searchsorted(equal.parent, widths)
    held = np.maximum(equal.full_held, equal.sparse_held)[column]
    # One token more for the shards that get an extra one in nested blocks.
    need = lengths * np.maximum(1 / widths, held) + (widths > 1)
    room: list[np.ndarray] = []
    rounds = np.empty(len(first), dtype=np.int64)
    order = np.lexsort((np.arange(len(first)), -widths))
    spans = zip(order.tolist(), first[order].tolist(), widths[order].tolist(), need[order].tolist(), strict=True)
    for item, at, width, amount in spans:
        number = next((k for k, free in enumerate(room) if free[at : at + width].min() >= amount), len(room))
        if number == len(room):
            room.append(np.full(problem.topology.world, float(problem.cap)))
        room[number][at : at + width] -= amount
        rounds[item] = number
    return rounds
