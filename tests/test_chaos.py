"""Whatever is killed: every sample once, and the losses of an unbroken run (`tests.chaos` has the rules).

`make chaos` kills a hundred times.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from raypack.config import Config
from raypack.data.corpus import Corpus
from raypack.data.splits import training_stream
from raypack.observe.record import StepRecord
from tests.chaos import KINDS, Chaos, chaos_config, check, unbroken
from tests.chaos_ranks import corpus_of
from tests.job_runs import tiny_corpus

pytestmark = [pytest.mark.pool, pytest.mark.rest]
KILLS = 4


@pytest.mark.parametrize(("experts", "shard", "seed"), [(False, "world", 1), (True, "none", 2)])
def test_a_run_whose_processes_are_killed_is_the_run_that_was_left_alone(
    tmp_path: Path, experts: bool, shard: str, seed: int
) -> None:
    config = chaos_config(30, experts=experts, shard=shard)
    corpus = str(corpus_of(tmp_path))
    run = Chaos(config, corpus, tmp_path / "killed", seed, KILLS)
    records = run.run()
    assert len(run.done) >= KILLS - 1  # the run may end before the last
    assert {kill.kind for kill in run.done} <= {*KINDS, "start"}
    assert len({record.world for record in records}) > 1
    assert len({record.epoch for record in records}) > 1
    whole = unbroken(config, corpus, tmp_path / "whole")
    check(records, whole, 1e-9 if experts else 1e-4)

    # The check itself can fail: a step twice, a step lost, another loss.
    effective = [record for record in records if record.effective]
    for broken in (effective + effective[-1:], effective[:5] + effective[6:], _with_loss(effective, 7, 1.001)):
        with pytest.raises(AssertionError):
            check(broken, whole, 1e-4)
    assert Counter(record.step for record in effective).most_common(1)[0][1] == 1


def test_ranks_that_leave_when_asked_repeat_nothing(tmp_path: Path) -> None:
    """One rank hears it; all save after the same step, and the next world goes on from there."""
    config = chaos_config(24, experts=False, shard="world")
    corpus = str(corpus_of(tmp_path))
    run = Chaos(config, corpus, tmp_path / "left", seed=5, kills=0, script=("leave", "leave"))
    records = run.run()
    assert run.attempts == 3
    assert len({record.world for record in records}) > 1
    assert [record.step for record in records] == list(range(24))  # also those between two regular checkpoints
    check(records, unbroken(config, corpus, tmp_path / "whole"), 1e-4)


def test_a_run_that_ended_with_an_epoch_goes_on_with_the_next_one(tmp_path: Path) -> None:
    """The last step of the epoch is a small one, and the checkpoint stands exactly behind it."""
    corpus = str(tiny_corpus(tmp_path / "small", documents=100, longest=300))
    config = chaos_config(1, experts=False, shard="none")
    stream = training_stream(Corpus.open(corpus), config.data)
    steps, state = 0, stream.start
    while state.epoch == 0:
        steps, state = steps + 1, stream.step(state).after
    assert state.next_sample == 0
    assert steps > 3

    def of(count: int) -> Config:
        train = config.train.model_copy(update={"lr_min_share": 1.0})  # a rate that does not depend on the run's length
        return config.model_copy(update={"run": config.run.model_copy(update={"steps": count}), "train": train})

    Chaos(of(steps), corpus, tmp_path / "run", seed=1, kills=0).run()
    later = Chaos(of(2 * steps + 1), corpus, tmp_path / "run", seed=2, kills=0)
    later.attempts = 1
    records = later.run()
    assert next((r.step, r.epoch, r.first_sample) for r in records if r.attempt == 1) == (steps, 1, 0)
    check(records, unbroken(of(2 * steps + 1), corpus, tmp_path / "whole"), 1e-4)


def _with_loss(records: list[StepRecord], step: int, factor: float) -> list[StepRecord]:
    return [r.model_copy(update={"loss": (r.loss or 0.0) * factor}) if r.step == step else r for r in records]
