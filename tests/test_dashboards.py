"""Dashboards: current, parseable, true to the declarations, and answered by a real Prometheus where there is one."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from dashboards import generate
from dashboards.panels import ANNOTATIONS, RANKS_SHOWN, Board
from dashboards.rules import ALERTS, RECORDINGS, Alert, Recording
from dashboards.sheet import queries
from raypack.observe import metrics
from tests.observe_cases import series_names
from tests.prometheus_server import needs_promtool

ROOT = Path(__file__).resolve().parent.parent
BOARDS: dict[str, dict[str, Any]] = {
    board.uid: json.loads(generate.board_file(board).read_text(encoding="utf-8")) for board in generate.BOARDS
}
DECLARED = {name: set(m.label_names) for m in metrics.METRICS for name in series_names(m)}
EXPRESSIONS = sorted({query.expr for _, _, query in queries()} | {mark.expr for mark in ANNOTATIONS})
RECORDED = {rule.name: {"run", "rank", "node"} if rule.name.startswith("rank:") else {"run"} for rule in RECORDINGS}
every_board = pytest.mark.parametrize("board", generate.BOARDS, ids=lambda board: board.uid)


FOREIGN = {"up": {"job", "instance"}}


def substituted(expr: str) -> str:
    timed = expr.replace("$window", "1m").replace("$__range", "1h")
    return timed.replace("$run", ".*").replace("$rank", ".*")


def test_files_are_what_the_declarations_make() -> None:
    for path, text in generate.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make dashboards`"
    ours = {generate.board_file(board) for board in generate.BOARDS}
    assert set(generate.HERE.glob("*.json")) == ours, "Grafana's provisioning reads every JSON file here"


def test_dashboards_differ_in_uid_and_title() -> None:
    for key in ("uid", "title"):
        assert len({board[key] for board in BOARDS.values()}) == len(generate.BOARDS)


@every_board
def test_ids_are_unique_and_panels_do_not_overlap(board: Board) -> None:
    panels = BOARDS[board.uid]["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@every_board
def test_every_query_of_the_panels_is_in_the_file_and_uses_the_variables(board: Board) -> None:
    made = BOARDS[board.uid]
    asked = {query.expr for row in board.rows for panel in row.panels for query in panel.queries}
    assert {target["expr"] for panel in made["panels"] for target in panel.get("targets", ())} == asked
    names = {variable["name"] for variable in made["templating"]["list"]}
    assert names == {"datasource", "run", "window", "rank"}
    used = {name for panel in made["panels"] for name in re.findall(r"\$\{?([a-z]+)", json.dumps(panel))}
    assert used == names, "a variable that no panel uses misleads"


@every_board
def test_every_figure_has_limits_of_its_own_and_lines_where_alerts_fire(board: Board) -> None:
    declared = [panel for row in board.rows for panel in row.panels]
    made = [panel for panel in BOARDS[board.uid]["panels"] if panel["type"] != "row"]
    for asked, panel in zip(declared, made, strict=True):
        shown = panel["fieldConfig"]["defaults"]
        steps = [(step["color"], step["value"]) for step in shown.get("thresholds", {}).get("steps", ())]
        if asked.limit is not None:
            assert steps[1:] == [("green" if asked.low else "red", asked.limit)], asked.title
            assert panel["type"] == "stat" or shown["custom"]["thresholdsStyle"]["mode"] == "dashed"
        elif panel["type"] == "stat":
            assert len(steps) == 1, "Grafana's default is red from 80 on"


@every_board
def test_attempts_and_checkpoints_are_marked_at_their_own_times(board: Board) -> None:
    marks = {mark["name"]: mark for mark in BOARDS[board.uid]["annotations"]["list"]}
    assert set(marks) == {"Attempts", "Checkpoints"}
    for mark in marks.values():
        assert mark["useValueForTime"]
        assert mark["expr"].endswith("* 1000"), "Grafana takes milliseconds"
        assert mark["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_a_panel_of_ranks_has_a_few_lines_whatever_the_world() -> None:
    by_rank = [expr for expr in EXPRESSIONS if 'rank=~"$rank"' in expr]
    whole = [expr for expr in by_rank if not groupings(promql_parser.parse(substituted(expr)))]
    assert len(whole) == 3
    for expr in whole:
        assert f" and topk by (run) ({RANKS_SHOWN}, " in expr
        assert "@ end()" in expr, "else another five at every point"


@every_board
def test_links_lead_to_the_other_dashboards_and_to_rays(board: Board) -> None:
    factory = pytest.importorskip("ray.dashboard.modules.metrics.dashboards.train_dashboard_panels")
    links = BOARDS[board.uid]["links"]
    assert [link["tags"] for link in links if link["type"] == "dashboards"] == [["raypack"]]
    assert "raypack" in BOARDS[board.uid]["tags"]
    targets = {link["url"] for link in links if link["type"] == "link"}
    assert f"/d/{factory.train_dashboard_config.default_uid}" in targets


@every_board
def test_there_are_no_nulls_and_no_place_of_one_machine(board: Board) -> None:
    text = generate.board_file(board).read_text(encoding="utf-8")
    for unwanted in ("null", "session_latest", "localhost", "/tmp"):
        assert unwanted not in text


def selectors(node: Any) -> list[promql_parser.VectorSelector]:
    """All series that an expression reads."""
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    if isinstance(node, promql_parser.MatrixSelector):
        return [node.vector_selector]
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")] + list(getattr(node, "args", []))
    return [found for child in children if child is not None for found in selectors(child)]


def groupings(node: Any) -> list[tuple[set[str], list[promql_parser.VectorSelector]]]:
    """(labels of a `by`, the series below it) for each aggregation. `topk` picks series and leaves them as they are."""
    here = []
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None and str(node.op) != "topk":
        here.append((set(node.modifier.labels), selectors(node.expr)))
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")] + list(getattr(node, "args", []))
    return here + [found for child in children if child is not None for found in groupings(child)]


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_expression_parses_and_names_declared_metrics_and_labels_only(expr: str) -> None:
    tree = promql_parser.parse(substituted(expr))
    read = selectors(tree)
    assert read
    for selector in read:
        matched = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        if selector.name in FOREIGN:
            assert set(matched) <= FOREIGN[selector.name]
            continue
        assert selector.name in DECLARED
        assert "run" in matched, "a panel shows the chosen runs only"
        assert set(matched) <= DECLARED[selector.name]
        labels = {label.name: label for label in _metric(selector.name).labels}
        for name, value in matched.items():
            for each in value.split("|") if value != ".*" else ():
                labels[name].check(each)
    for by, below in groupings(tree):
        for selector in below:
            assert by - {"le"} <= DECLARED[selector.name]
    assert ("rate(" in expr) == any(
        s.name in DECLARED and _metric(s.name).kind != "gauge" and "[" in expr for s in read
    )


@pytest.mark.parametrize("rule", [*RECORDINGS, *ALERTS], ids=lambda rule: rule.name)
def test_every_rule_names_what_is_declared_or_recorded(rule: Recording | Alert) -> None:
    known = {**DECLARED, **FOREIGN, **RECORDED}
    for selector in selectors(promql_parser.parse(rule.expr)):
        assert selector.name in known
        assert {matcher.name for matcher in selector.matchers.matchers} <= known[selector.name]
    if isinstance(rule, Alert):
        used = set(re.findall(r"\$labels\.(\w+)", rule.summary + rule.what_to_do))
        labels = [known[selector.name] for selector in selectors(promql_parser.parse(rule.value))]
        assert used <= set.intersection(*labels)


def _metric(series: str) -> metrics.Metric:
    return next(m for m in metrics.METRICS if series in series_names(m))


def test_legends_name_labels_that_the_result_has() -> None:
    for title, panel, query in queries():
        tree = promql_parser.parse(substituted(query.expr))
        kept = [by for by, _ in groupings(tree)]
        available = set.intersection(*kept) if kept else {**DECLARED, **FOREIGN}[selectors(tree)[0].name]
        used = set(re.findall(r"{{(\w+)}}", query.legend))
        assert used <= available, f"{title}, {panel.title}: {query.legend}"


def test_every_metric_is_shown() -> None:
    shown = {s.name for expr in EXPRESSIONS for s in selectors(promql_parser.parse(substituted(expr)))} - set(FOREIGN)
    assert {m.name for m in metrics.METRICS} == {_metric(name).name for name in shown}


def test_prometheus_finds_runs_by_a_pattern_that_it_accepts() -> None:
    config = yaml.safe_load((generate.HERE / "prometheus.yml").read_text(encoding="utf-8"))
    (pattern,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert re.fullmatch(r"[^*]*(\*[^/]*)?\.(json|yml|yaml)", pattern), "a star in the last part only"
    runs = (generate.HERE / pattern).resolve().parent
    assert runs == ROOT / "runs" / ".prometheus"


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    for kind, file in (("config", "prometheus.yml"), ("rules", generate.RULES.name)):
        done = subprocess.run(
            ["promtool", "check", kind, str(generate.HERE / file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_and_do_not_fire_as_their_cases_say() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", str(generate.HERE / "raypack-rules-test.yml")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = yaml.safe_load((generate.HERE / "raypack-rules-test.yml").read_text(encoding="utf-8"))
    asked = [case for test in cases["tests"] for case in test.get("alert_rule_test", ())]
    for alert in ALERTS:
        fires = {bool(case.get("exp_alerts")) for case in asked if case["alertname"] == alert.name}
        assert fires == {True, False}, alert.name


def test_provisioning_names_files_by_variables_only() -> None:
    files = sorted((generate.HERE / "provisioning").rglob("*.yml"))
    assert [file.parent.name for file in files] == ["dashboards", "datasources"]
    for file in files:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert content["apiVersion"] == 1
    (provider,) = yaml.safe_load(files[0].read_text(encoding="utf-8"))["providers"]
    assert provider["options"]["path"] == "${RAYPACK_DASHBOARDS}"
    (source,) = yaml.safe_load(files[1].read_text(encoding="utf-8"))["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "${RAYPACK_PROMETHEUS_URL}")
