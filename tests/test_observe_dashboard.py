"""Dashboards: current, parseable, true to the declarations, and answered by a real Prometheus where there is one."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from dashboards import generate
from dashboards.panels import ROWS
from raypack.observe import metrics
from raypack.observe.observer import RunObserver
from tests.observe_cases import report

ROOT = Path(__file__).resolve().parent.parent
BOARD: dict[str, Any] = json.loads(generate.DASHBOARD.read_text(encoding="utf-8"))
DECLARED = {name: set(m.label_names) for m in metrics.METRICS for name in m.series_names}
EXPRESSIONS = sorted({query.expr for row in ROWS for panel in row.panels for query in panel.queries})


def substituted(expr: str, run: str = ".*") -> str:
    return expr.replace("$__rate_interval", "1m").replace("$run", run)


def test_files_are_what_the_declarations_make() -> None:
    assert generate.DASHBOARD.read_text(encoding="utf-8") == generate.run_dashboard(), "run `make dashboards`"
    text = generate.DOCS.read_text(encoding="utf-8")
    assert text == generate.docs_page(text), "run `make dashboards`"


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert BOARD["uid"]
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_query_of_the_panels_is_in_the_file_and_uses_the_variables() -> None:
    found = {t["expr"] for panel in BOARD["panels"] for t in panel.get("targets", ())}
    assert found == set(EXPRESSIONS)
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert names == {"datasource", "run"}
    for panel in BOARD["panels"]:
        used = set(re.findall(r"\$\{?([a-z]+)", json.dumps(panel)))
        assert used <= names, panel["title"]


def test_there_are_no_nulls_and_no_place_of_one_machine() -> None:
    text = generate.DASHBOARD.read_text(encoding="utf-8")
    assert "null" not in text
    assert "session_latest" not in text
    assert "localhost" not in text


def selectors(node: Any) -> list[promql_parser.VectorSelector]:
    """All series that an expression reads."""
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    if isinstance(node, promql_parser.MatrixSelector):
        return [node.vector_selector]
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")] + list(getattr(node, "args", []))
    return [found for child in children if child is not None for found in selectors(child)]


def groupings(node: Any) -> list[tuple[set[str], list[promql_parser.VectorSelector]]]:
    """(labels of a `by`, the series below it) for each aggregation."""
    here = []
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        here.append((set(node.modifier.labels), selectors(node.expr)))
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")] + list(getattr(node, "args", []))
    return here + [found for child in children if child is not None for found in groupings(child)]


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_expression_parses_and_names_declared_metrics_and_labels_only(expr: str) -> None:
    tree = promql_parser.parse(substituted(expr))
    read = selectors(tree)
    assert read
    for selector in read:
        assert selector.name in DECLARED
        matched = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert "run" in matched, "a panel shows the chosen runs only"
        assert set(matched) <= DECLARED[selector.name]
        labels = {label.name: label for label in _metric(selector.name).labels}
        for name, value in matched.items():
            if name != "run":
                labels[name].check(value)
    for by, below in groupings(tree):
        for selector in below:
            assert by - {"le"} <= DECLARED[selector.name]
    assert ("rate(" in expr) == any(_metric(s.name).kind != "gauge" and "[" in expr for s in read)


def _metric(series: str) -> metrics.Metric:
    return next(m for m in metrics.METRICS if series in m.series_names)


def test_legends_name_labels_that_the_result_has() -> None:
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries:
                tree = promql_parser.parse(substituted(query.expr))
                kept = [by for by, _ in groupings(tree)]
                available = set.intersection(*kept) if kept else DECLARED[selectors(tree)[0].name]
                used = set(re.findall(r"{{(\w+)}}", query.legend))
                assert used <= available, f"{panel.title}: {query.legend}"


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    shown = {_metric(s.name).name for expr in EXPRESSIONS for s in selectors(promql_parser.parse(substituted(expr)))}
    left_out = {"raypack_labels_total", "raypack_model_flops_total", "raypack_plans_total", "raypack_rounds_total"}
    assert {m.name for m in metrics.METRICS} - shown == left_out


def test_prometheus_finds_runs_by_a_pattern_that_it_accepts() -> None:
    config = yaml.safe_load((generate.HERE / "prometheus.yml").read_text(encoding="utf-8"))
    (pattern,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert re.fullmatch(r"[^*]*(\*[^/]*)?\.(json|yml|yaml)", pattern), "a star in the last part only"
    runs = (generate.HERE / pattern).resolve().parent
    assert runs == ROOT / "runs" / ".prometheus"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus installed")
def test_every_expression_answers_on_a_scraped_run(tmp_path: Path) -> None:
    observer = RunObserver(str(tmp_path / "runs" / "r"), "r")
    config = yaml.safe_load((generate.HERE / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config["scrape_configs"] = config["scrape_configs"][:1]
    config["scrape_configs"][0]["file_sd_configs"][0]["files"] = [str(tmp_path / "runs" / ".prometheus" / "*.json")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _feed_until_scraped(observer, port)
        unanswered = [e for e in EXPRESSIONS if not _query(port, substituted(e, "r"))]
        # Neither was in the reports, and both are absent then.
        absent = {"raypack_heldout_loss", "raypack_learning_rate", "raypack_expert_load_ratio", "raypack_memory_bytes"}
        assert [e for e in unanswered if not any(name in e for name in absent)] == []
    finally:
        server.terminate()
        server.wait(timeout=20)
        observer.finish()


def _feed_until_scraped(observer: RunObserver, port: int, seconds: float = 60) -> None:
    """Steps go on until Prometheus has three samples of the run, which a rate needs."""
    deadline = time.monotonic() + seconds
    step = 0
    while time.monotonic() < deadline:
        for rank in range(2):
            observer.report(report(rank, step, attempt=step // 4))
        step += 1
        counted = _query(port, 'count_over_time(raypack_step{run="r"}[1m])')
        if counted and float(counted[0]["value"][1]) >= 4:
            return
        time.sleep(0.5)
    pytest.fail(f"Prometheus scraped nothing within {seconds} s")


def _query(port: int, expr: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []
        pytest.fail(f"{expr}: {error.read().decode()}")
    except urllib.error.URLError:
        return []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool installed")
def test_promtool_accepts_the_configuration() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", str(generate.HERE / "prometheus.yml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
