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

from raypack.errors import RaypackError
from raypack.observe import metrics
from raypack.observe.exporter import Endpoint, Exporter
from raypack.observe.metrics import METRICS, Label, Metric
from raypack.observe.record import StepRecord, merge
from raypack.parallel.ledger import COLLECTIVES, SITES
from raypack.planning.load import SITES as PLANNED_SITES
from tests.observe_cases import FACTS, record, report

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


def test_what_the_design_names_is_declared_with_its_labels() -> None:
    needed = {
        "raypack_all_to_all_bytes_total": {"site", "scope"},
        "raypack_collective_bytes_total": {"op", "scope"},
        "raypack_mfu_ratio": set(),
        "raypack_step_seconds": set(),
        "raypack_tokens_total": set(),
        "raypack_loss": set(),
        "raypack_plan_wait_seconds": set(),
        "raypack_plan_bound_ratio": set(),
        "raypack_rank_tokens": {"rank"},
        "raypack_rank_busy_seconds": {"rank"},
        "raypack_world_size": set(),
        "raypack_restarts_total": set(),
        "raypack_samples_total": set(),
        "raypack_samples_replayed_total": set(),
    }
    for name, labels in needed.items():
        assert set(metrics.BY_NAME[name].label_names) == labels | {"run"}
    assert metrics.BY_NAME["raypack_step_seconds"].kind == "histogram"
    assert len(metrics.BY_NAME) == len(METRICS)


def scrape(exporter: Exporter) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Series -> value, without `run`, checked to be declared."""
    declared = {name: set(m.label_names) for m in METRICS for name in m.series_names}
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
    assert found["raypack_rank_tokens", (("rank", "1"),)] == 2
    assert found["raypack_phase_seconds", (("phase", "forward"),)] == 2.0


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


def test_a_rank_that_did_not_report_shows_no_old_value() -> None:
    exporter = Exporter("a")
    exporter.update(record(), replayed=False)
    exporter.update(merge([report(0, step=1)]), replayed=False)
    found = scrape(exporter)
    assert ("raypack_rank_tokens", (("rank", "1"),)) not in found
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
    assert scrape(exporter)["raypack_rank_tokens", (("rank", "1"),)] == 8, "the rest is taken in all the same"


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
            bytes=dict.fromkeys(SITES, both),
            collective_bytes=dict.fromkeys(COLLECTIVES, both),
            bytes_static=dict.fromkeys(PLANNED_SITES, both),
            exchange_seconds=dict.fromkeys((*SITES, *COLLECTIVES), 0.5),
        ),
        replayed=False,
    )
    found = scrape(exporter)
    for site in SITES:
        assert found["raypack_all_to_all_seconds_total", (("site", site),)] == 0.5
    for op in COLLECTIVES:
        assert found["raypack_collective_seconds_total", (("op", op),)] == 0.5
