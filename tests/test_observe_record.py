"""Records: merged right, read back exactly, older ones readable, bad ones refused; which attempt's line counts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypack.errors import RaypackError
from raypack.observe.collector import Collector, merge
from raypack.observe.record import StepRecord, by_scope
from raypack.observe.run_files import STEPS_FILE
from raypack.observe.steps import StepLog, next_attempt, read_lines, read_steps, resolve
from raypack.observe.summary import read_summary, summarise
from tests.observe_cases import FACTS, record, report


def test_a_document_of_5_on_two_ranks_is_5_tokens_not_10() -> None:
    merged = merge([report(0), report(1)])
    assert merged.tokens == 5
    assert merged.rank_tokens == [3, 2]


def test_merge_sums_bytes_and_takes_the_slowest_rank() -> None:
    merged = merge([report(1), report(0)])
    assert merged.bytes == {"full_in": {"intra": 10, "inter": 200}}
    assert merged.collective_bytes == {"gradient_reduce": {"intra": 0, "inter": 2000}}
    assert merged.seconds == 3.0
    assert merged.plan_wait_seconds == 0.002
    assert merged.mfu == pytest.approx(6e9 / (3.0 * 2 * 1e9))
    assert merged.complete
    assert by_scope(merged.bytes) == {"intra": 10, "inter": 200}


def test_an_unknown_peak_gives_no_mfu() -> None:
    assert merge([report(0, facts=replace(FACTS, peak_flops=None)), report(1)]).mfu is None


def test_phases_are_means_that_add_up_to_the_step() -> None:
    """Rank 1 is there last and waits for nobody: what rank 0 takes beyond it in the sum of gradients is waiting."""
    first = {"plan_wait": 0.1, "forward": 0.5, "exchange": 0.2, "gradient_reduce": 1.1, "optimizer": 0.1}
    merged = merge([report(0, phases=first), report(1, phases={**first, "forward": 1.5, "gradient_reduce": 0.1})])
    assert merged.phase_seconds == {
        "plan_wait": 0.1, "forward": 1.0, "exchange": 0.2, "waiting": 0.5, "gradient_reduce": 0.1, "optimizer": 0.1,
        "other": 1.0,
    }  # fmt: skip
    assert sum(merged.phase_seconds.values()) == pytest.approx(merged.seconds)


def test_ranks_may_report_different_phases_and_sites() -> None:
    merged = merge([report(0, phases={"forward": 1.0}), report(1, phases={"backward": 0.5}, exchanged={})])
    assert merged.phase_seconds == {"forward": 0.5, "backward": 0.25, "other": 2.25}
    assert merged.bytes["full_in"]["inter"] == 100


def test_what_a_step_stands_still_for_is_no_part_of_it() -> None:
    saved = merge([report(0, checkpoint_seconds=0.5), report(1, checkpoint_seconds=0.7, prepare_seconds=0.2)])
    assert (saved.checkpoint_seconds, saved.prepare_seconds, saved.evaluate_seconds) == (0.7, 0.2, None)
    assert saved.checkpointed
    assert sum(saved.phase_seconds.values()) == pytest.approx(saved.seconds)
    assert not record().checkpointed


def test_nodes_have_the_names_of_their_machines_simulated_ones_a_number_too() -> None:
    def of(*hosts: str) -> StepRecord:
        return merge([report(rank, world=8, host=host) for rank, host in enumerate(hosts)])

    assert of(*["a"] * 4, *["b"] * 4).node_first_ranks == {"a": 0, "b": 4}
    assert of(*["a"] * 8).node_first_ranks == {"a/0": 0, "a/1": 4}
    unknown = of(*[""] * 8)
    assert unknown.node_first_ranks == {"0": 0, "1": 4}
    assert unknown.rank_nodes() == ["0"] * 4 + ["1"] * 4


def large(world: int, step: int = 0) -> StepRecord:
    """Nodes of 4; the last ranks are the busiest."""
    host = "ip-10-0-{}.eu-central-1.compute.internal"
    return merge(
        [report(r, step, world=world, busy_seconds=1 + r / world, host=host.format(r // 4)) for r in range(world)]
    )


def test_a_small_world_keeps_its_lists() -> None:
    listed = large(64)
    assert listed.compact() == listed
    assert len(listed.rank_busy_seconds) == 64


def test_a_record_of_4096_ranks_is_small_and_still_names_the_slowest() -> None:
    whole = large(4096)
    kept = whole.compact()
    text = kept.to_json()
    assert len(text) < 4096
    read = StepRecord.from_json(text)
    assert read == kept
    assert (read.rank_tokens, read.rank_busy_seconds, read.node_first_ranks) == ([], [], {})
    quantiles = read.across_ranks("busy_seconds")
    assert quantiles == whole.across_ranks("busy_seconds")
    assert quantiles.worst[0] == (4095, "ip-10-0-1023.eu-central-1.compute.internal", round(1 + 4095 / 4096, 6))
    assert [rank for rank, _, _ in quantiles.worst] == [4095, 4094, 4093, 4092, 4091]
    assert quantiles.quantiles == pytest.approx((1.0, 1.05, 1.5, 1.95, 2.0), abs=1e-3)
    assert read.imbalance("busy_seconds") == pytest.approx(2 / 1.5, abs=1e-3)


def test_quantiles_are_over_the_ranks_that_reported() -> None:
    partial = merge([report(0, world=3), report(2, world=3)])
    assert partial.across_ranks("tokens").worst == ((0, "0", 3.0), (2, "0", 2.0))
    assert partial.imbalance("tokens") == pytest.approx(3 / 2.5)
    assert StepRecord(step=0, attempt=0).across_ranks("tokens") is None


def test_phases_of_older_records_add_up_to_nothing_and_are_left_out() -> None:
    read = StepRecord.from_json(
        '{"version": 1, "step": 3, "attempt": 0, "phase_seconds": {"forward": 1.0, "prepare": 0.1, "checkpoint": 0.4}}'
    )
    assert (read.phase_seconds, read.checkpoint_seconds, read.prepare_seconds) == ({}, 0.4, 0.1)
    assert read.checkpointed


def test_a_missing_rank_makes_the_record_incomplete_and_names_itself() -> None:
    merged = merge([report(0, world=3), report(2, world=3)])
    assert not merged.complete
    assert merged.rank_tokens == [3, None, 2]
    without_facts = merge([report(1)])
    assert not without_facts.complete
    assert not without_facts.applied
    assert without_facts.loss is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_loss_that_is_not_finite_is_null(loss: float | None) -> None:
    merged = merge([report(0, facts=replace(FACTS, loss=loss, applied=False)), report(1)])
    assert merged.loss is None
    assert json.loads(merged.to_json())["loss"] is None
    assert StepRecord.from_json(merged.to_json()) == merged


@given(
    step=st.integers(0, 10**9),
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    counts=st.dictionaries(
        st.sampled_from(["full_in", "sparse_out"]),
        st.fixed_dictionaries({"intra": st.integers(0, 2**60), "inter": st.integers(0, 2**60)}),
    ),
    widths=st.dictionaries(st.integers(1, 4096), st.integers(1, 10**6)),
)
def test_json_round_trip_is_exact(step: int, loss: float | None, counts: dict, widths: dict) -> None:
    made = record().model_copy(update={"step": step, "loss": loss, "bytes": counts, "parent_widths": widths})
    text = made.to_json()
    assert "\n" not in text
    assert StepRecord.from_json(text) == made


def test_promised_fields_are_all_there() -> None:
    needed = (
        "step attempt epoch first_sample sample_count effective loss grad_norm tokens labels rounds seconds "
        "plan_wait_seconds plan_seconds plan_bound_ratio policy mfu model_flops bytes bytes_static bytes_dynamic "
        "world sample_ids_digest"
    )
    assert set(needed.split()) <= set(json.loads(record().to_json()))


def test_older_records_read_with_defaults_and_unknown_keys_are_passed_over() -> None:
    read = StepRecord.from_json('{"step": 3, "attempt": 1, "loss": 2.0, "a_later_key": [1]}')
    assert (read.step, read.attempt, read.loss, read.effective, read.bytes) == (3, 1, 2.0, True, {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"step": 1', "Invalid JSON"),
        ("[]", "object"),
        ('{"attempt": 0}', "step"),
        ('{"step": -1, "attempt": 0}', "step = -1"),
        ('{"step": 1, "attempt": 0, "tokens": "many"}', "tokens = 'many'"),
        ('{"version": 99, "step": 1, "attempt": 0}', "version = 99"),
    ],
)
def test_a_bad_record_is_one_clear_line(line: str, says: str) -> None:
    with pytest.raises(RaypackError) as caught:
        StepRecord.from_json(line, "steps.jsonl line 7")
    assert says in str(caught.value)
    assert "steps.jsonl line 7" in str(caught.value)


def test_the_last_attempt_wins() -> None:
    """Attempt 1 went on from a checkpoint after step 2: steps 3 and 4 of attempt 0 are not in the weights."""
    lines = [record(step) for step in range(5)] + [record(step, attempt=1) for step in (3, 4, 5)]
    found = {(r.step, r.attempt): r.effective for r in resolve(lines)}
    assert found == {
        (0, 0): True, (1, 0): True, (2, 0): True, (3, 0): False, (4, 0): False,
        (3, 1): True, (4, 1): True, (5, 1): True,
    }  # fmt: skip


def test_an_attempt_that_ends_early_still_voids_what_it_rolled_back() -> None:
    lines = [record(step) for step in range(6)] + [record(2, attempt=1), record(3, attempt=1)]
    kept = [(r.step, r.attempt) for r in resolve(lines) if r.effective]
    assert kept == [(0, 0), (1, 0), (2, 1), (3, 1)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=6))
def test_effective_steps_are_consecutive_and_unique(attempts: list[tuple[int, int]]) -> None:
    """Whatever the crashes: each attempt starts at or before the point that the earlier ones reached."""
    lines, reached = [], 0
    for number, (start, count) in enumerate(attempts):
        first = min(start, reached)
        lines += [record(step, attempt=number) for step in range(first, first + count)]
        reached = first + count
    kept = [r.step for r in resolve(lines) if r.effective]
    assert kept == list(range(reached))


def test_a_torn_last_line_is_passed_over_and_cut_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / STEPS_FILE
    path.write_text(record(0).to_json() + "\n" + record(1).to_json()[:40])
    assert [r.step for r in read_lines(path)] == [0]
    log = StepLog(path)
    log.update(record(1))
    log.close()
    assert [r.step for r in read_lines(path)] == [0, 1]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / STEPS_FILE
    path.write_text(f"{record(0).to_json()}\nnot json\n{record(1).to_json()}\n")
    with pytest.raises(RaypackError, match="line 2"):
        read_steps(tmp_path)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RaypackError, match=r"no steps\.jsonl"):
        read_steps(tmp_path)
    assert next_attempt(tmp_path) == 0
    assert read_summary(tmp_path) is None


def test_collector_settles_a_step_when_its_last_rank_reports_in_any_order() -> None:
    collector = Collector(clock=lambda: 5.0)
    assert collector.add(report(1, step=1)) == []
    assert collector.add(report(0, step=0)) == []
    assert [r.step for r in collector.add(report(0, step=1))] == [1]
    (settled,) = collector.add(report(1, step=0))
    assert (settled.step, settled.complete, settled.time) == (0, True, 5.0)
    assert collector.add(report(1, step=0)) == []
    assert collector.flush() == []


def test_a_new_attempt_settles_what_the_old_one_left_open() -> None:
    collector = Collector()
    collector.add(report(0, step=4))
    settled = collector.add(report(0, step=3, attempt=1, world=1))
    assert [(r.attempt, r.step, r.complete) for r in settled] == [(0, 4, False), (1, 3, True)]
    assert collector.add(report(1, step=4)) == [], "a rank of the old attempt comes too late"


def test_collector_is_bounded() -> None:
    collector = Collector(pending_max=3)
    settled = [r for step in range(100) for r in collector.add(report(0, step=step))]
    assert [r.step for r in settled] == list(range(97))
    assert not any(r.complete for r in settled)
    assert len(collector._pending) == 3
    assert len(collector._done) <= 12


def test_summary_counts_effective_steps_once() -> None:
    lines = [record(step, loss=5.0 - step) for step in range(4)]
    lines += [record(step, attempt=1, world=1, loss=4.5 - step) for step in (2, 3)]
    summary = summarise(resolve(lines), "r", "finished", ["nodes are simulated"])
    assert (summary.steps, summary.last_step, summary.replayed_steps, summary.restarts) == (4, 3, 2, 1)
    assert (summary.first_loss, summary.last_loss) == (5.0, 1.5)
    assert summary.tokens == 20
    assert summary.worlds == [2, 1]
    assert summary.bytes["full_in"]["inter"] == 2 * 200 + 2 * 100
    assert summary.tokens_per_second == pytest.approx(20 / (3.0 + 3.0 + 2.0 + 2.0))
    assert summary.parent_widths == {1: 4, 2: 4}
    assert summary.notes == ["nodes are simulated"]


def test_summary_of_nothing_has_no_figures() -> None:
    summary = summarise([])
    assert (summary.steps, summary.first_loss, summary.mfu, summary.tokens_per_second) == (0, None, None, None)
