"""The samples of a simulation: a length file or preset, drawn from as training draws from a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raypack.data.lengths import READERS, read_lengths
from raypack.data.stream import SampleStream
from raypack.errors import RaypackError
from raypack.plan.plan_file import LENGTH_MAX
from raypack.plan.samples import Samples
from raypack.simulate.presets import length_preset


@dataclass(frozen=True, eq=False)
class Trace:
    """A list of documents and the order a seed gives them.

    Attributes:
        name: preset or file.
        kind: measured, assumed or file.
        clipped: documents that were longer than `longest`.
        longest: longest sample that may occur, tokens.
    """

    name: str
    kind: str
    documents: int
    clipped: int
    longest: int
    stream: SampleStream

    def steps(self, count: int) -> Iterator[Samples]:
        """The samples of the first `count` steps; after the last document comes the next epoch."""
        state = self.stream.start
        for _ in range(count):
            step = self.stream.step(state)
            yield step.samples
            state = step.after


def read_trace(lengths: str, *, tokens_per_step: int, seed: int = 0, clip: int = 0) -> Trace:
    """Read a length file, or draw a preset's list, and put the documents into a seeded order.

    Args:
        lengths: preset name, or length file (by its suffix).
        tokens_per_step: a step takes samples until the next would exceed this; a lone larger one is a step of its own.
        seed: of the preset's lengths and of the order.
        clip: longer documents are cut to this many tokens; 0 = none is.

    Raises:
        RaypackError: an unknown preset, a bad file, an impossible number, or no document of two or more tokens (one
            token carries no label; such documents are skipped, as in training).
    """
    for name, value, least in (("tokens-per-step", tokens_per_step, 1), ("seed", seed, 0)):
        if value < least:
            raise RaypackError(f"{name} = {value}: must be at least {least}")
    if clip != 0 and not 2 <= clip <= LENGTH_MAX:
        raise RaypackError(f"clip = {clip}: must be at least 2 tokens and at most {LENGTH_MAX}, or 0 for none")
    name, kind, values = _documents(lengths, seed)
    longest = int(values.max())
    if longest < 2:
        raise RaypackError(
            f"{lengths}: all {len(values)} documents have one token, which has no label; give longer ones"
        )
    stream = SampleStream(
        values,
        values - 1,
        max_sample_tokens=clip or longest,
        long_documents="truncate",
        tokens_per_step=tokens_per_step,
        seed=seed,
    )
    clipped = stream.counts.truncated
    return Trace(name, kind, len(values), clipped, clip if clipped else longest, stream)


def _documents(lengths: str, seed: int) -> tuple[str, str, np.ndarray]:
    """Name, kind and tokens of each document."""
    if Path(lengths).suffix.lower() in READERS or Path(lengths).is_file():
        return Path(lengths).name, "file", read_lengths(lengths)
    preset = length_preset(lengths)
    return preset.name, preset.kind, preset.draw(preset.documents, seed)
