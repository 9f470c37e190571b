"""The sample stream: which samples each step takes, whatever the world looks like (pure; design section 6).

A state `(seed, epoch, next_sample)` determines the next step and the state after it. An epoch takes every usable
document once, in a seeded order; a step takes samples in that order until the next would exceed `tokens_per_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raypack.errors import RaypackError
from raypack.planning.plan import StreamState

LONG_DOCUMENTS = ("error", "truncate", "skip")


class Sample(NamedTuple):
    """One document. `id` = its index in the corpus, `length` in tokens (truncated), `labels` = how many carry one."""

    id: int
    length: int
    labels: int


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples as three int64 arrays of one size; iterating gives `Sample` records."""

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Sample]:
        return map(Sample, self.ids.tolist(), self.lengths.tolist(), self.labels.tolist())

    def __getitem__(self, index: Any) -> Samples:
        """A sub-set: `index` is a slice, an index array or a mask."""
        return Samples(self.ids[index], self.lengths[index], self.labels[index])

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


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
    tokens_cut: int
    skipped_long: int
    skipped_short: int


class SampleStream:
    """The world-free order of samples.

    Args:
        lengths: tokens of each document, integers of at least 1.
        labels: labels of each document, 0 to length - 1.
        max_sample_tokens: longest sample, tokens, at least 2.
        long_documents: what happens to longer documents: `error`, `truncate` or `skip`.
        tokens_per_step: a step takes samples until the next would exceed this; a lone larger one is its own step.
        seed: of the order, non-negative.
        documents: corpus index of each document; default 0, 1, 2, ...

    Documents of one token carry no label: they are skipped and counted.

    Raises:
        RaypackError: an impossible setting, a length or label count out of range, a document over
            `max_sample_tokens` under `error`, a masked document to be truncated, or no usable document at all.
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
        given = Samples(*(_int64(*each) for each in (("ids", documents), ("lengths", lengths), ("labels", labels))))
        self.samples, self.counts = usable_samples(given, max_sample_tokens, long_documents)
        if not len(self.samples):
            raise RaypackError(
                f"none of the {len(given)} training documents is usable: {self.counts.skipped_short} are shorter than "
                f"2 tokens, {self.counts.skipped_long} longer than data.max_sample_tokens = {max_sample_tokens}; "
                "give a corpus with more documents, raise the limit or set data.long_documents = truncate"
            )
        self.tokens_per_step = tokens_per_step
        self.start = StreamState(seed, 0, 0)
        self._held: tuple[tuple[int, int], np.ndarray, np.ndarray] | None = None

    def step(self, state: StreamState) -> StepSamples:
        """The samples of the step that begins at `state`, which alone decides (its seed too).

        A state at the very end of an epoch means the start of the next. An epoch's last step may be small.

        Raises:
            RaypackError: a state outside the epoch (of another corpus or other data settings).
        """
        count = len(self.samples)
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
        return StepSamples(state, after, self.samples[order[first:stop]])

    def _epoch(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order, and the tokens up to and including each sample in it; the last epoch is kept."""
        held = self._held
        if held is None or held[0] != (seed, epoch):
            order = epoch_order(len(self.samples), seed, epoch)
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
    _check_documents(given)
    short, long = given.lengths < 2, given.lengths > max_sample_tokens
    if long.any() and long_documents == "error":
        first = int(np.flatnonzero(long)[0])
        raise RaypackError(
            f"document {given.ids[first]} has {given.lengths[first]} tokens, over data.max_sample_tokens = "
            f"{max_sample_tokens} (so have {int(long.sum()) - 1} others): raise it, or set data.long_documents to "
            "truncate or skip"
        )
    keep = ~short if long_documents == "truncate" else ~(short | long)
    kept = given[keep]
    cut = kept.lengths > max_sample_tokens
    masked = cut & (kept.labels != kept.lengths - 1)
    if masked.any():
        first = int(np.flatnonzero(masked)[0])
        raise RaypackError(
            f"document {kept.ids[first]} has masked labels and {kept.lengths[first]} tokens, over "
            f"data.max_sample_tokens = {max_sample_tokens}: truncation could drop all its labels unseen; raise the "
            "limit or set data.long_documents = skip"
        )
    lengths = np.minimum(kept.lengths, max_sample_tokens)
    labels = np.where(cut, lengths - 1, kept.labels)
    counts = StreamCounts(
        samples=len(kept),
        tokens=int(lengths.sum()),
        truncated=int(cut.sum()),
        tokens_cut=int((kept.lengths - lengths).sum()),
        skipped_long=0 if long_documents == "truncate" else int(long.sum()),
        skipped_short=int(short.sum()),
    )
    return Samples(kept.ids, lengths, labels), counts


def _int64(name: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise RaypackError(f"sample {name}: must be one row of integers, not {array.dtype} {list(array.shape)}")
    return array.astype(np.int64)


def _check_documents(given: Samples) -> None:
    if not len(given.ids) == len(given.lengths) == len(given.labels):
        raise RaypackError(
            f"{len(given.ids)} ids, {len(given.lengths)} lengths and {len(given.labels)} label counts: "
            "one of each per document"
        )
    for wrong, name, limit in (
        (given.lengths < 1, "lengths", "must be at least 1 token; remove empty documents"),
        ((given.labels < 0) | (given.labels >= given.lengths), "labels", "must lie in 0..length - 1"),
    ):
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise RaypackError(f"document {given.ids[at]}: {name} = {getattr(given, name)[at]}: {limit}")
    if len(np.unique(given.ids)) != len(given.ids):
        raise RaypackError("two documents have the same id; sample ids must be unique")
