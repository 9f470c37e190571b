"""Length presets and traces: seeded, true to their figures, drawn as training draws."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raypack.data.lengths import read_lengths
from raypack.errors import RaypackError
from raypack.simulate.presets import PRESETS, length_preset
from raypack.simulate.trace import read_trace

REAL = Path(os.environ.get("RAYPACK_LENGTHS") or Path(__file__).parents[2] / "shared" / "lengths")
MEASURED = [name for name, preset in PRESETS.items() if preset.measured]

PUBLISHED = {
    "wikipedia": {"documents": 1_000_000, "mean": 1014, "p50": 347, "p99": 10_900, "p99.9": 37_000, "max": 1.82e6},
    "wlb128k": {"documents": 99_519, "mean": 3962, "p50": 3227, "p99": 26_000, "p99.9": 120_000, "max": 125e3},
    "prolong": {"documents": 77_932, "mean": 3052, "p50": 1914, "p99": 16_000, "p99.9": 47_000, "max": 340e3},
}
TOP_PERCENT = {"wikipedia": 0.84, "wlb128k": 0.79, "prolong": 0.63}


def middle(name: str, count: int = 200_000) -> np.ndarray:
    """The lengths at evenly spread quantiles: the distribution without the luck of a draw."""
    return np.rint(PRESETS[name].quantile((np.arange(count) + 0.5) / count))


def top_percent(lengths: np.ndarray) -> float:
    squares = np.sort(lengths.astype(np.float64))[::-1] ** 2
    return float(squares[: -(-len(squares) // 100)].sum() / squares.sum())


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_measured_presets_have_the_published_percentiles_and_tail(name: str) -> None:
    preset, published = PRESETS[name], PUBLISHED[name]
    n = middle(name, preset.documents)
    assert preset.documents == published["documents"]
    assert n.mean() == pytest.approx(published["mean"], rel=0.02)
    for percentile, rel in ((50, 0.002), (99, 0.02), (99.9, 0.02)):
        got = np.percentile(n, percentile, method="inverted_cdf")
        assert got == pytest.approx(published[f"p{percentile}"], rel=rel), percentile
    assert n.max() == pytest.approx(published["max"], rel=0.01)
    assert top_percent(n) == pytest.approx(TOP_PERCENT[name], abs=0.02)


@pytest.mark.parametrize("name", MEASURED)
def test_a_draw_of_a_measured_preset_looks_like_the_real_list(name: str) -> None:
    file = REAL / f"{name}.npz"
    if not file.is_file():
        pytest.skip(f"the real list is not there ({file}); RAYPACK_LENGTHS names its folder")
    real, preset = np.sort(read_lengths(file)), PRESETS[name]
    drawn = np.sort(preset.draw(preset.documents, seed=11))
    assert len(drawn) == len(real)
    clip = 131_072  # beyond it a handful of documents decide, and no draw can repeat them
    real, drawn = np.minimum(real, clip), np.minimum(drawn, clip)
    # Mean distance between equally ranked documents, against the mean length.
    assert np.abs(drawn - real).mean() / real.mean() < 0.04
    assert drawn.mean() == pytest.approx(real.mean(), rel=0.03)
    squares = (drawn.astype(np.float64) ** 2).sum() / (real.astype(np.float64) ** 2).sum()
    assert squares == pytest.approx(1, abs=0.1)
    assert top_percent(drawn) == pytest.approx(top_percent(real), abs=0.02)


def test_assumed_presets_keep_the_figures_they_name() -> None:
    mock = middle("megatron-mock")
    assert (mock.min(), mock.max()) == (128, 8192)
    inside = np.exp(1.5 * np.array([-1.0, 0.0, 1.0])) * 1024 * np.exp(-(1.5**2) / 2)
    assert np.percentile(mock, [15.8655, 50, 84.1345]) == pytest.approx(np.clip(inside, 128, 8192), rel=0.01)
    code = middle("github-like", 2_000_000)
    tokens = code.sum()
    assert code[code > 128 * 1024].sum() / tokens == pytest.approx(0.162, abs=0.001)
    assert code[code > 256 * 1024].sum() / tokens == pytest.approx(0.098, abs=0.001)
    mix = middle("finetune-mix")
    assert (mix > 8 * 1024).mean() == pytest.approx(0.0011, abs=1e-5)
    assert np.median(mix[mix <= 8 * 1024]) == pytest.approx(1024, rel=0.01)
    assert np.median(mix[mix > 8 * 1024]) == pytest.approx(37 * 1024, rel=0.01)
    long = middle("uniform-long")
    assert long.min() >= 64 * 1024
    assert long.max() <= 128 * 1024


@pytest.mark.parametrize("name", list(PRESETS))
def test_draws_are_a_pure_function_of_the_seed(name: str) -> None:
    preset = PRESETS[name]
    first = preset.draw(2000, seed=5)
    assert first.dtype == np.int64
    assert first.min() >= 1
    assert np.array_equal(first[:500], preset.draw(500, seed=5)), "a longer draw begins with the shorter one"
    assert not np.array_equal(first, preset.draw(2000, seed=6))


def test_a_draw_is_the_same_on_every_machine() -> None:
    assert PRESETS["prolong"].draw(4, 0).tolist() == [2857, 1224, 2447, 1692]


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_the_order_of_a_trace_does_not_sort_its_lengths(seed: int) -> None:
    trace = read_trace("prolong", tokens_per_step=500_000, seed=seed)
    means = [samples.lengths.mean() for samples in trace.steps(20)]
    assert 2000 < np.mean(means[:10]) < 4500
    assert 2000 < np.mean(means[10:]) < 4500


def test_a_trace_cuts_the_stream_as_training_does(tmp_path: Path) -> None:
    file = tmp_path / "n.txt"
    file.write_text("5\n4\n100\n3\n1\n8\n")
    trace = read_trace(str(file), tokens_per_step=12, seed=3, clip=20)
    assert (trace.kind, trace.documents, trace.clipped, trace.longest) == ("file", 6, 1, 20)
    steps = list(trace.steps(12))
    assert all(s.lengths.sum() <= 12 or len(s.lengths) == 1 for s in steps)
    first_epoch, count = [], 0
    for step in steps:
        count += len(step.ids)
        first_epoch += step.ids.tolist()
        if count >= 5:
            break
    assert sorted(first_epoch[:5]) == [0, 1, 2, 3, 5], "each document once; one token carries no label"
    assert [s.ids.tolist() for s in steps] == [
        s.ids.tolist() for s in read_trace(str(file), tokens_per_step=12, seed=3, clip=20).steps(12)
    ]


def test_without_a_clip_nothing_is_cut() -> None:
    trace = read_trace("wlb128k", tokens_per_step=10**6, seed=0)
    assert trace.clipped == 0
    assert trace.longest == PRESETS["wlb128k"].draw(99_519, 0).max()


@pytest.mark.parametrize(
    ("lengths", "changes", "words"),
    [
        ("wikipedio", {}, "no length preset 'wikipedio': there are wikipedia, prolong"),
        ("prolong", {"tokens_per_step": 0}, "tokens-per-step = 0: must be at least 1"),
        ("prolong", {"seed": -1}, "seed = -1"),
        ("prolong", {"clip": 1}, "clip = 1: must be at least 2"),
        ("nowhere.npz", {}, "no such file"),
    ],
)
def test_bad_traces_are_refused_in_one_line(lengths: str, changes: dict, words: str) -> None:
    with pytest.raises(RaypackError) as caught:
        read_trace(lengths, **{"tokens_per_step": 1000, **changes})
    assert words in str(caught.value)


def test_a_list_of_single_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ones.txt").write_text("1\n1\n")
    with pytest.raises(RaypackError, match="one token"):
        read_trace(str(tmp_path / "ones.txt"), tokens_per_step=10)


def test_an_unknown_preset_lists_all() -> None:
    with pytest.raises(RaypackError) as caught:
        length_preset("x")
    assert all(name in str(caught.value) for name in PRESETS)
