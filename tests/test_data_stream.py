"""The stream: one order for every world, each document once an epoch, nothing lost or repeated by a resume."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypack.data.stream import LONG_DOCUMENTS, SampleStream, StepSamples, epoch_order
from raypack.errors import RaypackError
from raypack.plan.plan import StreamState


def stream(lengths: list[int] | np.ndarray, per_step: int, longest: int = 1 << 40, **settings: object) -> SampleStream:
    array = np.asarray(lengths)
    options = {"long_documents": "error", "seed": 0, "labels": array - 1, **settings}
    return SampleStream(array, max_sample_tokens=longest, tokens_per_step=per_step, **options)  # type: ignore[arg-type]


def run(source: SampleStream, steps: int, state: StreamState | None = None) -> list[StepSamples]:
    done: list[StepSamples] = []
    for _ in range(steps):
        done.append(source.step(done[-1].after if done else state or source.start))
    return done


def ids(steps: list[StepSamples]) -> list[list[int]]:
    return [step.samples.ids.tolist() for step in steps]


def test_the_order_is_pinned_for_every_machine_and_numpy_version() -> None:
    assert epoch_order(16, seed=0, epoch=0).tolist() == [11, 3, 13, 2, 15, 1, 8, 6, 0, 7, 14, 4, 10, 12, 5, 9]
    assert epoch_order(16, seed=0, epoch=1).tolist() == [7, 10, 4, 11, 15, 12, 5, 1, 9, 8, 13, 6, 2, 0, 3, 14]
    assert epoch_order(8, seed=7, epoch=3).tolist() == [2, 4, 7, 3, 5, 1, 0, 6]


def test_resume_continues_with_the_next_samples_whoever_asks() -> None:
    """16 samples, 4 a step: read one step, save, resume elsewhere: samples 4-7 and 8-11 of the order follow."""
    order = epoch_order(16, seed=0, epoch=0).tolist()
    saved = run(stream([10] * 16, 40), 1)[0].after
    assert saved == (0, 0, 4)
    assert ids(run(stream([10] * 16, 40), 2, saved)) == [order[4:8], order[8:12]]


def test_a_second_resume_counts_from_the_first() -> None:
    source = stream([10] * 64, 10)
    saved = run(source, 30)[-1].after
    again = run(stream([10] * 64, 10), 10, saved)[-1].after
    assert (saved.next_sample, again.next_sample) == (30, 40)


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=40),
    per_step=st.integers(1, 120),
    seed=st.integers(0, 2**40),
    cut=st.integers(0, 60),
)
def test_every_epoch_takes_each_document_once_and_any_resume_gives_the_same_steps(
    lengths: list[int], per_step: int, seed: int, cut: int
) -> None:
    steps = run(stream(lengths, per_step, seed=seed), 80)
    for epoch in (0, 1):
        inside = [step for step in steps if step.before.epoch == epoch]
        if steps[-1].after.epoch > epoch:
            assert sorted(chain(*ids(inside))) == list(range(len(lengths)))
    for step, following in pairwise(steps):
        assert step.after == following.before
        count, tokens = len(step.samples.ids), int(step.samples.lengths.sum())
        assert tokens <= per_step or count == 1
        if step.after.epoch == step.before.epoch:  # the step is full: the next sample would not have fitted
            assert tokens + int(following.samples.lengths[0]) > per_step
            assert step.after.next_sample == step.before.next_sample + count
        else:
            assert step.after == (seed, step.before.epoch + 1, 0)
    fresh = stream(lengths, per_step, seed=seed + 1)  # the state carries the seed, not the settings
    assert ids(run(fresh, 80 - cut, steps[cut].before)) == ids(steps[cut:])


def test_a_lone_larger_sample_is_a_step_of_its_own() -> None:
    order = epoch_order(5, seed=0, epoch=0)
    lengths = np.full(5, 10)
    lengths[order[2]] = 100
    sizes = [step.samples.lengths.tolist() for step in run(stream(lengths, 30), 3)]
    assert sizes == [[10, 10], [100], [10, 10]]


def test_a_state_at_the_end_of_an_epoch_means_the_start_of_the_next() -> None:
    source = stream([10] * 6, 40)
    end, start = source.step(StreamState(0, 0, 6)), source.step(StreamState(0, 1, 0))
    assert end.before == start.before == (0, 1, 0)
    assert ids([end]) == ids([start])
    assert [len(each.samples.ids) for each in run(source, 4)] == [4, 2, 4, 2]


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_long_documents_are_cut_left_out_or_refused_and_counted() -> None:
    lengths, longest = [5, 40, 1, 30, 31], 30
    cut = stream(lengths, 1000, longest, long_documents="truncate")
    taken = run(cut, 1)[0].samples
    assert dict(
        zip(taken.ids.tolist(), zip(taken.lengths.tolist(), taken.labels.tolist(), strict=True), strict=True)
    ) == {
        0: (5, 4),
        1: (30, 29),
        3: (30, 29),
        4: (30, 29),
    }
    assert (cut.counts.samples, cut.counts.tokens, cut.counts.truncated) == (4, 95, 2)
    assert (cut.counts.skipped_long, cut.counts.skipped_short) == (0, 1)
    left = stream(lengths, 1000, longest, long_documents="skip")
    assert sorted(run(left, 1)[0].samples.ids.tolist()) == [0, 3]
    assert (left.counts.skipped_long, left.counts.skipped_short, left.counts.truncated) == (2, 1, 0)
    with pytest.raises(RaypackError, match=r"document 1 has 40 tokens, over data.max_sample_tokens = 30 .* 1 others"):
        stream(lengths, 1000, longest, long_documents="error")


def test_masked_labels_are_kept_and_never_guessed_under_truncation() -> None:
    lengths, labels = np.array([10, 20, 20]), np.array([3, 19, 0])
    taken = run(stream(lengths, 1000, labels=labels), 1)[0].samples
    assert dict(zip(taken.ids.tolist(), taken.labels.tolist(), strict=True)) == {0: 3, 1: 19, 2: 0}
    with pytest.raises(RaypackError, match="document 2 has 20 tokens"):
        stream(lengths, 1000, 15, labels=labels, long_documents="truncate")
    assert run(stream(lengths, 1000, 15, labels=labels, long_documents="skip"), 1)[0].samples.labels.tolist() == [3]


def test_ids_are_the_corpus_indices_of_the_documents() -> None:
    source = stream([4, 5, 6], 100, documents=np.array([3, 8, 20]))
    taken = run(source, 1)[0].samples
    assert dict(zip(taken.ids.tolist(), taken.lengths.tolist(), strict=True)) == {3: 4, 8: 5, 20: 6}


@pytest.mark.parametrize("lengths", [[3, 0, 4], [3, -1], [1.5, 2.0], []])
def test_lengths_that_are_none_are_rejected(lengths: list[float]) -> None:
    with pytest.raises(RaypackError):
        stream(np.array(lengths), 10, labels=np.zeros(len(lengths), dtype=np.int64))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"longest": 1}, "max_sample_tokens = 1"),
        ({"per_step": 0}, "tokens_per_step = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"long_documents": "cut"}, "error, truncate, skip"),
        ({"lengths": [1, 1]}, "2 have less than 2 tokens"),
        ({"longest": 4, "long_documents": "skip"}, "2 more than data.max_sample_tokens = 4"),
        ({"labels": np.array([3, 9])}, "labels"),
        ({"labels": np.array([3])}, "labels"),
        ({"documents": np.array([3, 3])}, "twice"),
    ],
)
def test_impossible_settings_name_the_value(settings: dict[str, object], text: str) -> None:
    options = {"lengths": [5, 6], "per_step": 10, **settings}
    with pytest.raises(RaypackError, match=text):
        stream(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [(0, 0, 7), (0, 0, -1), (0, -1, 0)])
def test_a_state_of_another_corpus_is_refused(state: tuple[int, int, int]) -> None:
    with pytest.raises(RaypackError, match="epoch of 6 samples"):
        stream([10] * 6, 40).step(StreamState(*state))


@pytest.mark.parametrize("rule", LONG_DOCUMENTS[1:])
def test_a_long_tailed_corpus_is_streamed_without_a_loss(rule: str) -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.5, 100_000).astype(np.int64) + 1
    source = stream(lengths, 4_194_304, 16_384, long_documents=rule)
    inside = [step for step in run(source, 60) if step.before.epoch == 0]
    assert 20 < len(inside) < 60
    taken = np.concatenate([step.samples.ids for step in inside])
    assert len(np.unique(taken)) == len(taken) == source.counts.samples
    assert source.counts.tokens == sum(int(step.samples.lengths.sum()) for step in inside)
    kept = np.minimum(lengths[taken], 16_384)
    assert source.counts.tokens == kept.sum()
    assert source.counts.truncated == (lengths[taken] > kept).sum()
