"""Length presets: seeded generators of document lengths, for simulations without the corpus.

Each preset is a quantile function: the length below which a share u of the documents lies. Drawing = one uniform
number a document, through that function.

- *measured*: percentiles of a real list of documents, joined by straight lines of log(length) over logit(u), which are
  power laws in the tails. Mean, p99.9 and the sum of squares come within a few percent of the list's.
- *assumed*: a textbook distribution that keeps the published figures its `about` line names; the rest is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from raypack.errors import RaypackError

Quantile = Callable[[np.ndarray], np.ndarray]
"""Shares in (0, 1), float64 [n], to lengths, float64 [n], ascending."""

K = 1024


@dataclass(frozen=True)
class LengthPreset:
    """A generator of document lengths.

    Attributes:
        documents: how many the real list has; what a simulation draws.
        measured: the percentiles are those of a real list; else the distribution is assumed.
        about: where the figures come from.
    """

    name: str
    documents: int
    measured: bool
    about: str
    quantile: Quantile

    @property
    def kind(self) -> str:
        return "measured" if self.measured else "assumed"

    def draw(self, count: int, seed: int) -> np.ndarray:
        """int64 [count], tokens. PCG64 seeded with `seed`: the first n lengths are the same for every count >= n."""
        # A spawn key of its own: `data.stream` orders documents by the plain seed's numbers, which would sort these.
        raw = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,))).random_raw(count)
        shares = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return np.maximum(np.rint(self.quantile(shares)), 1).astype(np.int64)


def length_preset(name: str) -> LengthPreset:
    """Raises RaypackError for an unknown name; lists those there are."""
    if name not in PRESETS:
        raise RaypackError(
            f"no length preset {name!r}: there are {', '.join(PRESETS)}, or give a .txt, .npy, .npz or .parquet file"
        )
    return PRESETS[name]


def through(points: dict[float, int], documents: int) -> Quantile:
    """Power-law pieces through {percentile: length}; 0 and 100 are the shortest and longest of `documents`."""
    half = 0.5 / documents
    at = _logit(np.clip(np.array(list(points)) / 100, half, 1 - half))
    logs = np.log(np.array(list(points.values()), dtype=np.float64))
    return lambda shares: np.exp(np.interp(_logit(shares), at, logs))


def lognormal(median: float, sigma: float, low: float, high: float) -> Quantile:
    """Clipped to low..high, as samplers do, so that both ends hold what lies beyond them."""
    normal = NormalDist()

    def quantile(shares: np.ndarray) -> np.ndarray:
        deviates = np.fromiter(map(normal.inv_cdf, shares.tolist()), dtype=np.float64, count=len(shares))
        return np.clip(median * np.exp(sigma * deviates), low, high)

    return quantile


def pareto(low: float, high: float, exponent: float) -> Quantile:
    """Documents over n tokens ~ n ** -exponent between low and high, none beyond."""
    rest = (low / high) ** exponent
    return lambda shares: low * (1 - shares * (1 - rest)) ** (-1 / exponent)


def uniform(low: float, high: float) -> Quantile:
    return lambda shares: low + shares * (high - low)


def joined(body: Quantile, tail: Quantile, tail_share: float) -> Quantile:
    """`tail_share` of the documents follow `tail`, the rest `body`, which must end where `tail` begins."""

    def quantile(shares: np.ndarray) -> np.ndarray:
        long = shares > 1 - tail_share
        out = np.empty_like(shares)
        out[~long] = body(shares[~long] / (1 - tail_share))
        out[long] = tail((shares[long] - (1 - tail_share)) / tail_share)
        return out

    return quantile


def _logit(shares: np.ndarray) -> np.ndarray:
    return np.log(shares / (1 - shares))


WIKIPEDIA = {
    0: 1, 1: 39, 10: 87, 25: 146, 50: 347, 75: 862, 90: 2112, 95: 3720, 99: 10_919, 99.9: 37_367, 99.99: 101_537,
    99.999: 230_941, 100: 1_823_777,
}  # fmt: skip
PROLONG = {
    0: 575, 1: 678, 10: 919, 25: 1237, 50: 1913, 75: 3467, 90: 6051, 95: 8379, 99: 16_273, 99.9: 47_500,
    99.99: 240_055, 100: 340_149,
}  # fmt: skip
WLB128K = {
    0: 1, 1: 63, 5: 324, 10: 646, 25: 1606, 50: 3227, 75: 4832, 90: 5784, 95: 6110, 97: 6236, 98: 10_080, 99: 26_070,
    99.3: 46_584, 99.5: 69_118, 99.7: 91_226, 99.9: 119_836, 100: 124_913,
}  # fmt: skip

# With documents over n tokens ~ n ** -a up to 2M, their tokens ~ n ** (1 - a) - 2M ** (1 - a); a makes the share over
# 256K 9.8 / 16.2 of that over 128K, and the tail's share of the documents makes the latter 16.2 % of all tokens.
GITHUB_EXPONENT = 1.515506
GITHUB_TAIL_SHARE = 0.0350623
GITHUB_TAIL = pareto(16 * K, 2048 * K, GITHUB_EXPONENT)
GITHUB_BODY = lognormal(median=600, sigma=1.2, low=1, high=16 * K)

PRESETS = {
    preset.name: preset
    for preset in (
        LengthPreset(
            "wikipedia", 1_000_000, True, "the wikipedia list: mean 1.0K, p99 10.9K, longest 1.8M tokens",
            through(WIKIPEDIA, 1_000_000),
        ),
        LengthPreset(
            "prolong", 77_932, True, "the prolong list: mean 3.1K, p99 16K, longest 340K tokens",
            through(PROLONG, 77_932),
        ),
        LengthPreset(
            "wlb128k", 99_519, True, "the wlb128k list: mean 4.0K, p99 26K, longest 125K tokens",
            through(WLB128K, 99_519),
        ),
        LengthPreset(
            "megatron-mock", 100_000, False,
            "Megatron's mock for dynamic CP: lognormal, mean 1024, sigma 1.5, 128 to 8192",
            lognormal(median=1024 * math.exp(-(1.5**2) / 2), sigma=1.5, low=128, high=8192),
        ),
        LengthPreset(
            "github-like", 100_000, False,
            "code with a long tail: 16.2 % of tokens in documents over 128K, 9.8 % over 256K, none over 2M",
            joined(GITHUB_BODY, GITHUB_TAIL, GITHUB_TAIL_SHARE),
        ),
        LengthPreset(
            "finetune-mix", 100_000, False, "fine-tuning: 99.89 % of samples around 1K tokens, 0.11 % around 37K",
            joined(lognormal(K, 0.3, 128, 8 * K), lognormal(37 * K, 0.1, 24 * K, 56 * K), 0.0011),
        ),
        LengthPreset(
            "uniform-long", 100_000, False, "long documents only: 64K to 128K tokens, evenly spread",
            uniform(64 * K, 128 * K),
        ),
    )
}  # fmt: skip
"""By name."""
