"""Compute that takes a stated time and nothing else: a rank sleeps for what its kernel would take.

On one machine the ranks' arithmetic shares the cores, so wall clock shows neither imbalance nor overlap. With emulated
compute it does: whoever waits, waits, and messages travel while ranks sleep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from raypack.kernels import partial as kernels_partial
from raypack.kernels.packing import Span
from raypack.kernels.partial import Partial


def pairs(spans: Sequence[Span]) -> int:
    """Query-key pairs of the spans."""
    total = 0
    for span in spans:
        rows, keys = span.query_end - span.query, span.key_end - span.key
        total += rows * (rows + 1) // 2 if span.causal else rows * keys
    return total


@contextmanager
def attention(pair_seconds: float, launch_seconds: float = 0.0) -> Iterator[None]:
    """Replace the attention kernel: forward takes `pair_seconds` for a pair of one head, backward twice that."""

    def work(spans: Sequence[Span], heads: int, passes: int) -> None:
        seconds = passes * (pairs(spans) * heads * pair_seconds + launch_seconds)
        if seconds > 0:
            time.sleep(seconds)

    def forward(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], scale: float) -> list[Partial]:
        work(spans, q.shape[1], 1)
        sizes = [span.query_end - span.query for span in spans]
        return [Partial(q.new_zeros(n, *q.shape[1:]), torch.zeros(n, q.shape[1])) for n in sizes]

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Sequence[Span], *rest: object
    ) -> None:
        work(spans, q.shape[1], 2)

    with mock.patch.multiple(kernels_partial, forward=forward, backward=backward):
        yield
