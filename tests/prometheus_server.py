"""A real Prometheus for tests: Debian's package, on a free port, ended with the test."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import generate

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus installed")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool installed")


def shortened(expr: str) -> str:
    """The rules' windows cut to what a small run fills."""
    return expr.replace("[10m]", "[10s]").replace("offset 1h", "offset 3s").replace("[1h]", "[10s]")


@contextmanager
def prometheus(folder: Path, runs: Path) -> Iterator[str]:
    """Scrapes every run below `runs` once a second, with the generated rules; gives its URL."""
    config: dict[str, Any] = yaml.safe_load((generate.HERE / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"] = config["scrape_configs"][:1]
    config["scrape_configs"][0]["file_sd_configs"][0].update(
        files=[str(runs / ".prometheus" / "*.json")], refresh_interval="1s"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "raypack-rules.yml").write_text(shortened(generate.rules_yaml()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            stdout=log, stderr=log,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, folder / "log")
        yield url
    finally:
        server.terminate()
        server.wait(timeout=20)


def _wait_until_ready(url: str, log: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"Prometheus was not ready within {seconds} s: {log.read_text()[-500:]}")


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=10) as reply:
        return json.load(reply)["data"]
