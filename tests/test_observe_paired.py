"""The interval that the overhead of observing is judged by."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.paired import interval, verdict


@pytest.mark.parametrize(("count", "ranks"), [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15)), (100, (40, 61))])
def test_its_ends_are_the_order_statistics_of_the_sign_test(count: int, ranks: tuple[int, int]) -> None:
    values = list(range(1, count + 1))
    random.Random(0).shuffle(values)
    assert interval(values) == ranks


def test_it_holds_the_median_in_95_of_100_draws_however_the_noise_is_skewed() -> None:
    draw = random.Random(1)
    inside = 0
    for _ in range(2000):
        low, high = interval([draw.lognormvariate(0, 1) for _ in range(25)])
        inside += low <= 1 <= high
    assert 0.945 <= inside / 2000 <= 0.975


def test_under_six_values_nothing_is_decided() -> None:
    assert interval([1.0] * 5) == (0.0, math.inf)
    assert verdict(0.0, math.inf, 1.01) == "undecided"
    assert [verdict(0.99, 1.01, 1.01), verdict(1.011, 1.02, 1.01), verdict(1.0, 1.02, 1.01)] == [
        "holds", "missed", "undecided",
    ]  # fmt: skip
