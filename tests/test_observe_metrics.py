"""Declarations: checked when made, exported as declared, one registry an exporter, series that end with their rank."""

from __future__ import annotations

import re
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import raypack
from raypack.errors import RaypackError
from raypack.observe import metrics
from raypack.observe.collector import merge
from raypack.observe.exporter import Endpoint, Exporter
from raypack.observe.metrics import METRICS, Label, Metric
from raypack.observe.pace import Pace
from raypack.observe.record import StepRecord
from raypack.plan.names import COLLECTIVES, EXCHANGE_SITES, PLANNED_SITES
from raypack.version import code_version
from tests.observe_cases import FACTS, record, report, series_names

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "train/loss"}, "train/loss"),
        ({"name": "loss"}, "raypack_"),
        ({"name": "raypack_Loss"}, "raypack_Loss"),
        ({"name": "raypack_loss_total"}, "counters end in _total"),
        ({"name": "raypack_steps", "kind": "counter"}, "counters end in _total"),
        ({"name": "raypack_wait", "unit": "seconds"}, "_seconds"),
        ({"name": "raypack_wait_ms", "unit": "ms"}, "base units"),
        ({"name": "raypack_step_seconds", "kind": "histogram"}, "buckets"),
        ({"name": "raypack_loss", "buckets": (1.0,)}, "buckets"),
        ({"name": "raypack_loss", "labels": (Label("rank"), Label("rank"))}, "twice"),
        ({"name": "raypack_loss", "help": ""}, "help"),
    ],
)
def test_an_invalid_declaration_raises_at_definition(fields: dict, says: str) -> None:
    with pytest.raises(RaypackError, match=re.escape(says)):
        Metric(**({"kind": "gauge", "unit": "", "help": "x"} | fields))
    assert Metric("raypack_train_loss", "gauge", "", "x").name == "raypack_train_loss"


@pytest.mark.parametrize("name", ["run", "le", "Site", "site-name", ""])
def test_an_invalid_label_raises_at_definition(name: str) -> None:
    with pytest.raises(RaypackError, match="label"):
        Label(name)


def test_the_promised_names_are_declared_with_its_labels() -> None:
    needed = {
        "raypack_all_to_all_bytes_total": {"site", "scope"},
        "raypack_collective_bytes_total": {"op", "scope"},
        "raypack_mfu_ratio": set(),
        "raypack_step_seconds": set(),
        "raypack_tokens_total": set(),
        "raypack_loss": set(),
        "raypack_plan_wait_seconds": set(),
        "raypack_plan_bound_ratio": set(),
        "raypack_rank_tokens": {"rank", "node"},
        "raypack_rank_busy_seconds": {"rank", "node"},
        "raypack_world_size": set(),
        "raypack_restarts_total": set(),
        "raypack_samples_total": set(),
        "raypack_samples_replayed_total": set(),
    }
    declared = {metric.name: metric for metric in METRICS}
    assert len(declared) == len(METRICS)
    for name, labels in needed.items():
        assert set(declared[name].label_names) == labels | {"run"}
    assert declared["raypack_step_seconds"].kind == "histogram"


def scrape(exporter: Exporter) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Series -> value, without `run`, checked to be declared."""
    declared = {name: set(m.label_names) for m in METRICS for name in series_names(m)}
    found = {}
    for family in text_string_to_metric_families(prometheus_client.generate_latest(exporter.registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels["run"] == exporter.run
            assert set(labels) - {"le"} == declared[sample.name]
            found[sample.name, tuple(sorted((k, v) for k, v in labels.items() if k != "run"))] = sample.value
    return found


def test_two_exporters_in_one_process_do_not_meet() -> None:
    first, second = Exporter("a"), Exporter("a")
    first.update(record(), replayed=False)
    assert scrape(first)["raypack_tokens_total", ()] == 5
    assert scrape(second)["raypack_tokens_total", ()] == 0


def test_a_record_shows_as_the_declared_series() -> None:
    exporter = Exporter("a")
    exporter.update(record(0), replayed=False)
    exporter.update(record(1), replayed=True)
    found = scrape(exporter)
    assert found["raypack_step", ()] == 1
    assert found["raypack_tokens_total", ()] == 10
    assert found["raypack_samples_total", ()] == 4
    assert found["raypack_samples_replayed_total", ()] == 2
    assert found["raypack_all_to_all_bytes_total", (("scope", "inter"), ("site", "full_in"))] == 400
    static = (("policy", "static"), ("scope", "inter"), ("site", "full_in"))
    assert found["raypack_policy_bytes_total", static] == 1800
    assert found["raypack_collective_bytes_total", (("op", "gradient_reduce"), ("scope", "inter"))] == 4000
    assert found["raypack_step_seconds_count", ()] == 2
    assert found["raypack_step_seconds_sum", ()] == 6.0
    assert found["raypack_loss", ()] == 2.5
    assert found["raypack_mfu_ratio", ()] == pytest.approx(1.0)
    assert found["raypack_plans_total", (("policy", "joint"),)] == 2
    assert found["raypack_block_samples_total", (("block", "parent"), ("width", "2"))] == 2
    assert found["raypack_rank_tokens", (("node", "0"), ("rank", "1"))] == 2
    assert found["raypack_phase_seconds", (("phase", "forward"),)] == 1.5


def test_series_of_closed_sets_are_there_before_their_first_event() -> None:
    found = scrape(Exporter("a"))
    for site in ("full_in", "sparse_out"):
        assert found["raypack_all_to_all_bytes_total", (("scope", "inter"), ("site", site))] == 0
    assert found["raypack_restarts_total", ()] == 0
    assert ("raypack_loss", ()) not in found, "a gauge that was never set is absent, not 0"
    assert ("raypack_mfu_ratio", ()) not in found


def test_ranks_that_are_gone_lose_their_series() -> None:
    exporter = Exporter("a")
    exporter.update(record(world=4), replayed=False)
    exporter.update(record(1, attempt=1, world=2), replayed=False)
    found = scrape(exporter)
    ranks = {dict(labels)["rank"] for name, labels in found if name == "raypack_rank_busy_seconds"}
    assert ranks == {"0", "1"}
    assert found["raypack_world_size", ()] == 2


def test_a_rank_is_shown_on_the_machine_that_it_is_on_now() -> None:
    exporter = Exporter("a")
    for step, host in enumerate(("fast", "slow", "fast")):
        exporter.update(
            merge([report(rank, step, world=8, host=host if rank > 3 else "a") for rank in range(8)]), False
        )
        found = scrape(exporter)
        for name in ("raypack_rank_tokens", "raypack_rank_busy_seconds", "raypack_rank_wait_seconds"):
            nodes = {dict(labels)["rank"]: dict(labels)["node"] for series, labels in found if series == name}
            assert nodes == {str(rank): host if rank > 3 else "a" for rank in range(8)}


def test_modelled_seconds_stand_beside_each_other() -> None:
    exporter = Exporter("a")
    for step in range(2):
        exporter.update(record(step), replayed=False)
    found = scrape(exporter)
    modelled = {
        plan: found["raypack_modelled_seconds_total", (("plan", plan),)] for plan in ("own", "static", "dynamic")
    }
    assert modelled == {"own": 4.0, "static": 6.0, "dynamic": 5.0}


def test_what_checkpoints_cost_is_counted_beside_the_steps() -> None:
    exporter = Exporter("a")
    exporter.update(record(0, checkpoint_seconds=0.5, evaluate_seconds=0.25), replayed=False)
    exporter.update(record(1), replayed=False)
    exporter.checkpoint_failed()
    found = scrape(exporter)
    names = ("checkpoints", "checkpoint_seconds", "checkpoint_failures", "evaluate_seconds")
    assert [found[f"raypack_{name}_total", ()] for name in names] == [1, 0.5, 1, 0.25]


def test_the_build_is_one_series_that_names_what_runs() -> None:
    ((_, labels),) = [series for series in scrape(Exporter("a")) if series[0] == "raypack_build_info"]
    assert dict(labels)["version"] == raypack.__version__
    assert code_version().endswith(dict(labels)["code"])
    assert all(value for _, value in labels)


def test_goodput_is_the_share_of_effective_steps_of_all_time_since_the_start() -> None:
    pace = Pace()
    assert pace.goodput is None
    for step in range(4):
        pace.add(record(step, seconds=2.0, time=100.0 + 5 * step, run_seconds=10.0 + 5 * step))
    assert pace.goodput == pytest.approx(8 / 25)
    # Steps 2 and 3 are done again, after half a minute.
    pace.add(record(2, attempt=1, seconds=3.0, time=145.0, run_seconds=55.0))
    assert pace.effective_seconds == pytest.approx(2 + 2 + 3)
    assert pace.goodput == pytest.approx(7 / 55)
    pace.add(record(2, attempt=1, seconds=3.0, time=146.0, run_seconds=56.0))
    assert pace.effective_seconds == pytest.approx(7), "a step counts once"


def test_the_eta_goes_by_the_clock_and_starts_anew_with_an_attempt() -> None:
    pace = Pace(steps=11)
    assert pace.eta_seconds is None
    for step in range(5):
        pace.add(record(step, seconds=2.0, time=100.0 + 5 * step))
    assert pace.eta_seconds == pytest.approx(6 * 5.0)
    pace.add(record(3, attempt=1, seconds=2.0, time=1000.0))
    assert pace.eta_seconds == pytest.approx(7 * 2.0), "the break between attempts is no pace"
    pace.add(record(10, attempt=1, seconds=2.0, time=1001.0))
    assert pace.eta_seconds == 0
    assert Pace().eta_seconds is None


def test_a_rank_that_did_not_report_shows_no_old_value() -> None:
    exporter = Exporter("a")
    exporter.update(record(), replayed=False)
    exporter.update(merge([report(0, step=1)]), replayed=False)
    found = scrape(exporter)
    assert [dict(labels)["rank"] for name, labels in found if name == "raypack_rank_tokens"] == ["0"]
    assert found["raypack_steps_incomplete_total", ()] == 1


def test_a_skipped_step_counts_and_leaves_the_loss() -> None:
    exporter = Exporter("a")
    exporter.update(record(), replayed=False)
    skipped = replace(FACTS, loss=float("nan"), applied=False)
    exporter.update(merge([report(0, step=1, facts=skipped), report(1, step=1)]), replayed=False)
    found = scrape(exporter)
    assert found["raypack_loss", ()] == 2.5
    assert found["raypack_steps_skipped_total", ()] == 1


def test_unknown_phases_are_other_and_unknown_sites_are_refused() -> None:
    exporter = Exporter("a")
    exporter.update(record(phase_seconds={"dance": 1.0, "sing": 0.5}), replayed=False)
    assert scrape(exporter)["raypack_phase_seconds", (("phase", "other"),)] == 1.5
    with pytest.raises(RaypackError, match="site = 'nowhere'"):
        exporter.update(record(1, bytes={"nowhere": {"intra": 1, "inter": 0}}, rank_tokens=[7, 8]), replayed=False)
    assert scrape(exporter)["raypack_rank_tokens", (("node", "0"), ("rank", "1"))] == 8, (
        "the rest is taken in all the same"
    )


def test_a_record_without_facts_exports() -> None:
    exporter = Exporter("a")
    exporter.update(StepRecord(step=0, attempt=0, complete=False, applied=False), replayed=False)
    assert scrape(exporter)["raypack_steps_skipped_total", ()] == 0


def test_port_0_is_any_free_one_and_a_named_port_in_use_is_an_error() -> None:
    exporter = Exporter("a")
    endpoint = Endpoint(exporter, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as reply:
            assert b"raypack_tokens_total" in reply.read()
        with pytest.raises(RaypackError, match=rf"observe\.port = {endpoint.port}.*choose another address or port"):
            Endpoint(Exporter("b"), "127.0.0.1", endpoint.port)
    finally:
        endpoint.close()
    with socket.socket() as free_again:
        free_again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free_again.bind(("127.0.0.1", endpoint.port))


@pytest.mark.parametrize("bind", ["192.0.2.77", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_an_error(bind: str) -> None:
    with pytest.raises(RaypackError, match=re.escape(bind)):
        Endpoint(Exporter("a"), bind, 0)


def test_docs_table_is_the_declarations() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert metrics.table() in text, "run `make dashboards`"
    assert metrics.label_table() in text, "run `make dashboards`"


def test_a_thousand_steps_leave_the_series_count_constant() -> None:
    exporter = Exporter("a")
    counts = []
    for step in range(1000):
        changes = {"parent_widths": {1 << step % 4: 1}, "heldout_loss": 2.0, "expert_load": 1.0, "learning_rate": 1e-3}
        exporter.update(record(step, world=4).model_copy(update=changes), replayed=False)
        if step in (10, 999):
            counts.append(len(scrape(exporter)))
    assert counts[0] == counts[1]
    assert counts[1] < 300


def test_whatever_a_ledger_counts_or_times_has_a_series() -> None:
    both = {"intra": 2, "inter": 3}
    exporter = Exporter("a")
    exporter.update(
        record(
            bytes=dict.fromkeys(EXCHANGE_SITES, both),
            collective_bytes=dict.fromkeys(COLLECTIVES, both),
            bytes_static=dict.fromkeys(PLANNED_SITES, both),
            exchange_seconds=dict.fromkeys((*EXCHANGE_SITES, *COLLECTIVES), 0.5),
        ),
        replayed=False,
    )
    found = scrape(exporter)
    for site in EXCHANGE_SITES:
        assert found["raypack_all_to_all_seconds_total", (("site", site),)] == 0.5
    for op in COLLECTIVES:
        assert found["raypack_collective_seconds_total", (("op", op),)] == 0.5
