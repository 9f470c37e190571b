"""The two splits of a corpus as samples: the training stream and the held-out set."""

from __future__ import annotations

import numpy as np

from raypack.config import DataSection
from raypack.data.corpus import Documents
from raypack.data.stream import SampleStream, epoch_order, usable_samples
from raypack.errors import RaypackError
from raypack.plan.samples import Samples


def training_stream(corpus: Documents, settings: DataSection) -> SampleStream:
    """The stream over the training documents; raises RaypackError as `SampleStream` does."""
    documents = corpus.documents("train")
    return SampleStream(
        corpus.lengths[documents],
        corpus.labels[documents],
        max_sample_tokens=settings.max_sample_tokens,
        long_documents=settings.long_documents,
        tokens_per_step=settings.tokens_per_step,
        seed=settings.seed,
        documents=documents,
    )


def holdout_samples(corpus: Documents, settings: DataSection) -> Samples | None:
    """The samples of one evaluation: held-out documents of at most `holdout_tokens` tokens together.

    They go by in one fixed random order, whatever the run's seed, and each that still fits is taken, so runs with
    the same corpus and limits are compared on the same text. The length rules are the stream's.

    Returns:
        the samples by id; None where `holdout_tokens` is 0 or the corpus holds nothing out.

    Raises:
        RaypackError: no held-out document fits, or one is longer than allowed under `long_documents = error`.
    """
    documents = corpus.documents("holdout")
    if not settings.holdout_tokens or not len(documents):
        return None
    given = Samples(documents, corpus.lengths[documents], corpus.labels[documents])
    usable, counts = usable_samples(given, settings.max_sample_tokens, settings.long_documents)
    left, taken = settings.holdout_tokens, []
    for index in epoch_order(counts.samples, seed=0, epoch=0).tolist():
        if usable.lengths[index] <= left:
            left -= int(usable.lengths[index])
            taken.append(index)
    if not taken:
        raise RaypackError(
            f"data.holdout_tokens = {settings.holdout_tokens}: the shortest held-out sample has "
            f"{usable.lengths.min()} tokens; raise it, or set it to 0 for no evaluation"
        )
    rows = np.sort(taken)
    return Samples(usable.ids[rows], usable.lengths[rows], usable.labels[rows])
