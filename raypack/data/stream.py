"""The sample stream: which samples each step takes, whatever the world looks like (pure; docs/planning.md).

A state `(seed, epoch, next_sample)` determines the next step and the state after it. An epoch takes every usable
document once, in a seeded order; a step takes samples in that order until the next would exceed `tokens_per_step`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypack.errors import RaypackError
from raypack.plan.plan import StreamState
from raypack.plan.samples import Samples

LONG_DOCUMENTS = ("error", "truncate", "skip")


@dataclass(frozen=True, eq=False)
class StepSamples:
    """One step's samples between two stream states. `before` is in normal form (never at an epoch's end)."""

    before: StreamState
    after: StreamState
    samples: Samples


@dataclass(frozen=True)
class StreamCounts:
    """What one epoch holds, and what the length rules did. Documents, unless a name says tokens."""

    samples: int
    tokens: int
    truncated: int
    skipped_long: int
    skipped_short: int


class SampleStream:
    """The world-free order of samples.

    Args:
        lengths: tokens of each document, integers of at least 1.
        labels: how many of them carry a label (length - 1 in plain text).
        max_sample_tokens: longest sample, tokens, at least 2.
        long_documents: what happens to longer documents: `error`, `truncate` or `skip`.
        tokens_per_step: a step takes samples until the next would exceed this; a lone larger one is its own step.
        seed: of the order, non-negative.
        documents: corpus index of each document; default 0, 1, 2, ...

    Documents of one token carry no label: they are skipped and counted.

    Raises:
        RaypackError: an impossible setting, a length or label count out of range (as `Samples`), a document over
            `max_sample_tokens` under `error`, a document with masked labels to truncate, or no usable document.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        labels: np.ndarray,
        *,
        max_sample_tokens: int,
        long_documents: str,
        tokens_per_step: int,
        seed: int,
        documents: np.ndarray | None = None,
    ) -> None:
        for name, value, least in (
            ("max_sample_tokens", max_sample_tokens, 2),
            ("tokens_per_step", tokens_per_step, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise RaypackError(f"data.{name} = {value}: must be at least {least}")
        documents = np.arange(len(lengths)) if documents is None else documents
        given = Samples(documents, lengths, labels)
        self.samples, self.counts = usable_samples(given, max_sample_tokens, long_documents)
        self.tokens_per_step = tokens_per_step
        self.start = StreamState(seed, 0, 0)
        self._held: tuple[tuple[int, int], np.ndarray, np.ndarray] | None = None

    def step(self, state: StreamState) -> StepSamples:
        """The samples of the step that begins at `state`, which alone decides (its seed too).

        A state at the very end of an epoch means the start of the next. An epoch's last step may be small.

        Raises:
            RaypackError: a state outside the epoch (of another corpus or other data settings).
        """
        count = self.counts.samples
        if min(state) < 0 or state.next_sample > count:
            raise RaypackError(
                f"stream state {tuple(state)} lies outside an epoch of {count} samples: it belongs to another corpus "
                "or other data settings; resume with those it was made with"
            )
        if state.next_sample == count:
            state = StreamState(state.seed, state.epoch + 1, 0)
        order, ends = self._epoch(state.seed, state.epoch)
        first = state.next_sample
        taken = int(ends[first - 1]) if first else 0
        stop = max(int(np.searchsorted(ends, taken + self.tokens_per_step, side="right")), first + 1)
        after = state._replace(next_sample=stop) if stop < count else StreamState(state.seed, state.epoch + 1, 0)
        rows, usable = order[first:stop], self.samples
        return StepSamples(state, after, Samples(usable.ids[rows], usable.lengths[rows], usable.labels[rows]))

    def _epoch(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order, and the tokens up to and including each sample in it; the last epoch is kept."""
        held = self._held
        if held is None or held[0] != (seed, epoch):
            order = epoch_order(self.counts.samples, seed, epoch)
            held = self._held = ((seed, epoch), order, np.cumsum(self.samples.lengths[order]))
        return held[1], held[2]


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `count` samples, the same on every machine and in every numpy version.

    Each sample draws a 64-bit key from PCG64 seeded with (seed, epoch), and the keys are sorted. numpy promises the
    raw output of a bit generator for good, but not the algorithm behind `Generator.permutation` (NEP 19).
    """
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(count)
    return np.argsort(keys, kind="stable")


def usable_samples(given: Samples, max_sample_tokens: int, long_documents: str) -> tuple[Samples, StreamCounts]:
    """Apply the length rules to documents; the rules and errors are those of `SampleStream`."""
    if long_documents not in LONG_DOCUMENTS:
        raise RaypackError(f"data.long_documents = {long_documents!r}: must be one of {', '.join(LONG_DOCUMENTS)}")
    short, long = given.lengths < 2, given.lengths > max_sample_tokens
    if long_documents == "error" and long.any():
        raise RaypackError(
            f"{_first(given, long)} tokens, over data.max_sample_tokens = {max_sample_tokens} (so have "
            f"{int(long.sum()) - 1} others): raise it, or set data.long_documents to truncate or skip"
        )
    masked = long & (given.labels != given.lengths - 1)
    if long_documents == "truncate" and masked.any():
        raise RaypackError(
            f"{_first(given, masked)} tokens, over data.max_sample_tokens = {max_sample_tokens}, and masked labels: "
            "how many would be left after truncation is not known; raise it, or set data.long_documents to skip"
        )
    kept = ~short if long_documents == "truncate" else ~(short | long)
    skipped_long = 0 if long_documents == "truncate" else int(long.sum())
    if not kept.any():
        raise RaypackError(
            f"none of {len(given.ids)} documents is usable: {int(short.sum())} have less than 2 tokens, {skipped_long} "
            f"more than data.max_sample_tokens = {max_sample_tokens}; give other documents, raise the limit or set "
            "data.long_documents to truncate"
        )
    lengths = np.minimum(given.lengths, max_sample_tokens)
    labels = np.where(long, lengths - 1, given.labels)
    counts = StreamCounts(
        samples=int(kept.sum()),
        tokens=int(lengths[kept].sum()),
        truncated=int((long & kept).sum()),
        skipped_long=skipped_long,
        skipped_short=int(short.sum()),
    )
    return Samples(given.ids[kept], lengths[kept], labels[kept]), counts


def _first(samples: Samples, mask: np.ndarray) -> str:
    at = int(mask.argmax())
    return f"document {samples.ids[at]} has {samples.lengths[at]}"
