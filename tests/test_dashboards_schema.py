"""Dashboards against Grafana's own types (`@grafana/schema`), made a JSON schema that refuses unknown keys.

Needs npm and a registry that it reaches; skipped with the reason where either is missing.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dashboards import generate
from dashboards.panels import Board

pytestmark = pytest.mark.slow

PACKAGES = ("@grafana/schema@13.2.3", "ts-json-schema-generator@2.9.0")
RAW = "@grafana/schema/dist/types/raw"
TYPES = f"""
import type {{ Dashboard }} from "{RAW}/dashboard/x/types.gen";
import type {{ Options as T, FieldConfig as F }} from "{RAW}/composable/timeseries/panelcfg/x/types.gen";
import type {{ Options as S }} from "{RAW}/composable/stat/panelcfg/x/types.gen";
export type Board = Dashboard; export type TimeSeries = T; export type TimeSeriesField = F; export type Stat = S;
"""
# The types of a Prometheus query are not in the package; these are the keys of Grafana's own Prometheus plugin.
TARGET_KEYS = {"expr", "legendFormat", "refId", "range", "instant", "format", "datasource", "interval", "hide"}
# Nor those of its annotations: `annotations.mjs` of `@grafana/prometheus` 13.1.
ANNOTATION_KEYS = {"expr", "textFormat", "titleFormat", "tagKeys", "useValueForTime"}
every_board = pytest.mark.parametrize("board", generate.BOARDS, ids=lambda board: board.uid)


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{type: JSON schema}."""
    if shutil.which("npm") is None:
        pytest.skip("no npm installed")
    folder = tmp_path_factory.mktemp("grafana")
    (folder / "package.json").write_text('{"private": true}')
    (folder / "types.ts").write_text(TYPES)
    options = {"module": "esnext", "moduleResolution": "node", "skipLibCheck": True, "strict": True}
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "files": ["types.ts"]}))
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--legacy-peer-deps", *PACKAGES]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm could not install {PACKAGES[0]}: {done.stderr[-200:]}")
    return {name: _schema(folder, name) for name in ("Board", "TimeSeries", "TimeSeriesField", "Stat")}


def _schema(folder: Path, name: str) -> Any:
    command = ["node_modules/.bin/ts-json-schema-generator", "--path", "types.ts", "--tsconfig", "tsconfig.json",
               "--type", name, "--no-type-check"]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads(done.stdout)


def load(board: Board) -> dict[str, Any]:
    return json.loads(generate.board_file(board).read_text(encoding="utf-8"))


def panels(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in data["panels"] if panel["type"] != "row")


@every_board
def test_the_dashboard_is_what_grafana_calls_one(schemas: dict[str, Any], board: Board) -> None:
    data = load(board)
    for annotation in data["annotations"]["list"]:
        for key in ANNOTATION_KEYS:
            annotation.pop(key)
    jsonschema.validate(data, schemas["Board"])


@every_board
def test_options_of_every_panel_are_those_of_its_kind(schemas: dict[str, Any], board: Board) -> None:
    for panel in panels(load(board)):
        kind = {"timeseries": "TimeSeries", "stat": "Stat"}[panel["type"]]
        jsonschema.validate(panel.get("options", {}), _partial(schemas[kind]))
        if kind == "TimeSeries":
            jsonschema.validate(panel["fieldConfig"]["defaults"].get("custom", {}), schemas["TimeSeriesField"])
        for target in panel["targets"]:
            assert set(target) <= TARGET_KEYS


def _partial(schema: dict[str, Any]) -> dict[str, Any]:
    """Grafana fills in options that are left out, so none is required."""
    made = copy.deepcopy(schema)
    for definition in made["definitions"].values():
        definition.pop("required", None)
    return made


def test_unknown_keys_and_wrong_kinds_are_refused(schemas: dict[str, Any]) -> None:
    good = load(generate.BOARDS[0]) | {"annotations": {"list": []}}
    spoilt = []
    for change in (
        lambda d: d.update(refrsh="10s"),
        lambda d: d.update(refresh=10),
        lambda d: d["panels"][1].update(tittle="x"),
        lambda d: d["panels"][1]["gridPos"].update(widht=3),
        lambda d: d["templating"]["list"][0].update(multy=True),
        lambda d: d["links"][0].update(kepTime=True),
        lambda d: d["panels"][1]["fieldConfig"]["defaults"].update(units="s"),
    ):
        data = copy.deepcopy(good)
        change(data)
        spoilt.append(data)
    for data in spoilt:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data, schemas["Board"])
