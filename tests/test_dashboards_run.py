"""A real Prometheus scrapes a real small run: every expression of every panel and rule must have given data."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from dashboards.panels import ANNOTATIONS, Query
from dashboards.rules import ALERTS, RECORDINGS
from dashboards.sheet import Source, draw, queries
from raypack.cli import main
from raypack.observe.exporter import Exporter
from raypack.observe.steps import read_steps
from tests.machine import scaled
from tests.prometheus_server import get, needs_prometheus, prometheus, shortened

pytestmark = [pytest.mark.ray, pytest.mark.rest, needs_prometheus]

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "run.steps": 60,
    # Linear layers: wide children gather states, a collective that is timed.
    "model.layers": 3, "model.pattern": "FSL", "model.width": 16, "model.window": 32, "model.heads": 4,
    "model.kv_heads": 2, "model.head_dim": 8, "model.expert_width": 16, "model.shared_expert_width": 16,
    # A sample of 512 fits no single rank, shorter ones do: parents of 2 and of 1.
    "data.max_sample_tokens": 512, "data.tokens_per_step": 1024, "data.holdout_tokens": 512,
    "plan.rank_tokens_max": 400,
    "topology.workers": 2, "topology.nodes": "[1, 1]",
    "train.eval_every": 20, "train.checkpoint_every": 20,
    "observe.table": "false", "observe.tensorboard": "true", "trace": 40,
}  # fmt: skip


@dataclass(frozen=True)
class Scraped:
    """A finished run and the Prometheus that watched it."""

    run_dir: Path
    source: Source
    rules: dict


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    runs = folder / "runs"
    (runs / ".prometheus").mkdir(parents=True)
    flags = [f"--{name}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, str(ROOT / "jobs" / "train_1f3s.py"), f"--run.root={runs}", "--run.name=small", *flags]
    with prometheus(folder / "prometheus", runs) as url:
        started = time.time()
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"RAYPACK_HOME": str(folder / "home")},
            capture_output=True, text=True, timeout=scaled(240), check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        source = Source(url, started, time.time(), 1.0, rate_window="10s", run="small")
        yield Scraped(runs / "small", source, get(url, "/api/v1/rules?type=alert"))


def test_the_run_was_worth_looking_at(scraped: Scraped) -> None:
    records = read_steps(scraped.run_dir)
    assert len(records) == 60
    assert {width for r in records for width in r.parent_widths} == {1, 2}
    assert any(r.exchange_rates for r in records)
    assert {kind for r in records for kind in r.layer_seconds} == {"embed", "full", "sparse", "linear", "head"}
    assert {"plan_wait", "agree", "forward", "backward", "exchange", "waiting"} < {
        p for r in records for p in r.phase_seconds
    }
    for record in records:
        assert sum(record.phase_seconds.values()) == pytest.approx(record.seconds, abs=1e-4)


def test_ranks_are_shown_on_their_nodes(scraped: Scraped) -> None:
    found = scraped.source.ask('raypack_rank_busy_seconds{run="small"}')
    host = socket.gethostname()
    assert {(each["metric"]["rank"], each["metric"]["node"]) for each in found} == {
        ("0", f"{host}/0"),
        ("1", f"{host}/1"),
    }


def test_the_run_left_a_trace_of_all_ranks_and_tensorboard_events(scraped: Scraped) -> None:
    events = json.loads((scraped.run_dir / "traces" / "step-40.json").read_text())["traceEvents"]
    for name in ("forward", "gradient_reduce", "exchange full_in", "layer full"):
        assert {event["pid"] for event in events if event["name"] == name} == {0, 1}, name
    assert list((scraped.run_dir / "tensorboard").glob("events.out.tfevents*"))


def test_the_run_can_be_inspected(scraped: Scraped, tmp_path: Path) -> None:
    run = str(scraped.run_dir)
    done = CliRunner().invoke(main, ["inspect", run, "--step", "7", "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    for wanted in ("Plan of step 7", "Exchange bytes against static and dynamic plans", "topology.nodes = [1, 1]"):
        assert wanted in page


def test_every_panel_has_data_in_every_query(scraped: Scraped) -> None:
    empty = [f"{board}, {panel.title}: {query.expr}" for board, panel, query in queries() if not has(scraped, query)]
    assert empty == []
    assert [mark.name for mark in ANNOTATIONS if not scraped.source.marks(mark)] == []


def test_marks_are_where_an_attempt_started_and_where_checkpoints_were(scraped: Scraped) -> None:
    marks = {mark.name: scraped.source.marks(mark) for mark in ANNOTATIONS}
    saved = [record.time for record in read_steps(scraped.run_dir) if record.checkpointed]
    assert len(saved) == 3
    assert marks["Checkpoints"] == pytest.approx(saved[: len(marks["Checkpoints"])], abs=1e-2)
    assert len(marks["Attempts"]) == 1


def has(scraped: Scraped, query: Query) -> bool:
    return bool(scraped.source.lines(query))


def test_every_rule_has_data(scraped: Scraped) -> None:
    """Recorded series as Prometheus recorded them; of alerts the value that is held against the limit."""
    wanted = [rule.name for rule in RECORDINGS] + [shortened(alert.value) for alert in ALERTS]
    assert [expr for expr in wanted if not has(scraped, Query(expr, ""))] == []


def test_every_alert_was_evaluated_without_an_error(scraped: Scraped) -> None:
    rules = {rule["name"]: rule for group in scraped.rules["groups"] for rule in group["rules"]}
    assert set(rules) == {alert.name for alert in ALERTS}
    for rule in rules.values():
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule


def test_the_contact_sheet_shows_every_panel(scraped: Scraped, tmp_path: Path) -> None:
    target = Path(os.environ.get("RAYPACK_CONTACT_SHEET", tmp_path / "sheet.png"))
    assert draw(scraped.source, target) == []
    assert target.read_bytes().startswith(b"\x89PNG")


def test_what_prometheus_stored_is_what_the_records_say(scraped: Scraped) -> None:
    records = read_steps(scraped.run_dir)
    exporter = Exporter("again")
    for record in records:
        exporter.update(record, replayed=False)  # raises where a record holds what no series is declared for
    (line,) = scraped.source.lines(Query('sum(raypack_all_to_all_bytes_total{run="small", scope="inter"})', ""))
    sent = [sum(site["inter"] for site in record.bytes.values()) for record in records]
    counts = {sum(sent[: n + 1]) for n in range(len(sent))} | {0}
    assert set(line.values.tolist()) <= counts
    assert json.loads((scraped.run_dir / "metrics.json").read_text())["serving"] is False
