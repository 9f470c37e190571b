"""Where records go besides the run's files: what TensorBoard's, W&B's and MLflow's own formats hold afterwards."""

from __future__ import annotations

import csv
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypack.errors import RaypackError
from raypack.observe import sinks
from raypack.observe.observer import RunObserver
from raypack.observe.steps import read_steps
from tests.machine import scaled
from tests.observe_cases import report


def observed(run_dir: Path, *names: str, steps: range = range(3), attempt: int = 0) -> None:
    """A run of two ranks with these sinks."""
    observer = RunObserver(str(run_dir), "r", sinks=names)
    for step in steps:
        for rank in range(2):
            observer.report(report(rank, step, attempt))
    observer.finish()


class Slow:
    """Takes longer for one record than a run may wait."""

    def __init__(self, run_dir: Path, run_name: str) -> None: ...

    def update(self, *_: object) -> None:
        time.sleep(30)

    def close(self) -> None: ...


class Failing(Slow):
    def update(self, *_: object) -> None:
        raise ValueError("never again")


class Unable(Slow):
    def __init__(self, run_dir: Path, run_name: str) -> None:
        raise OSError("no room")


def test_tensorboard_events_hold_the_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    observed(tmp_path, "tensorboard")
    (file,) = (tmp_path / "tensorboard").iterdir()
    scalars: dict[str, list[tuple[int, float]]] = {}
    for event in tensorboard_events(file):
        for value in event.summary.value:
            scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert scalars["learning/loss"] == [(step, 2.5) for step in range(3)]
    assert scalars["bytes/inter"][0] == (0, 200)
    assert scalars["balance/tokens"][0][1] == pytest.approx(3 / 2.5)
    assert "learning/heldout_loss" not in scalars, "what was not measured is absent"


def tensorboard_events(file: Path) -> Iterator:
    """TensorFlow's record format: the size and its checksum, an event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = file.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size


def test_an_offline_run_of_wandb_holds_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install raypack[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.toml").write_text("[train]\nlr = 0.25\n")
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", scaled(60))
    observed(tmp_path, "wandb")
    time.sleep(1.1)  # W&B names its folders by the second
    observed(tmp_path, "wandb", steps=range(2, 4), attempt=1)  # the run goes on: step 2 comes again
    logged, settings = [], {}
    for file in sorted(tmp_path.glob("wandb/offline-run-*/run-r.wandb")):
        for entry in wandb_records(file):
            if entry.WhichOneof("record_type") == "history":
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in entry.history.item}
                logged.append((int(items["step"]), float(items["learning/loss"]), float(items["bytes/inter"])))
            elif entry.WhichOneof("record_type") == "run":
                settings |= {item.key: item.value_json for item in entry.run.config.update}
    assert logged == [(step, 2.5, 200.0) for step in (0, 1, 2, 2, 3)]
    assert settings["train.lr"] == "0.25"


def wandb_records(file: Path) -> Iterator:
    """W&B's own messages in its log: 7 bytes of head, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_a_store_of_mlflow_holds_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install raypack[mlflow]")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    (tmp_path / "config.toml").write_text("[train]\nlr = 0.25\n")
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", scaled(60))
    observed(tmp_path, "mlflow")
    observed(tmp_path, "mlflow", steps=range(2, 4), attempt=1)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("raypack").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["train.lr"]) == ("r", "FINISHED", "0.25")
    losses = client.get_metric_history(run.info.run_id, "learning/loss")
    assert sorted((m.step, m.value) for m in losses) == [(step, 2.5) for step in (0, 1, 2, 2, 3)]


def test_the_example_writes_a_line_a_step(tmp_path: Path) -> None:
    observed(tmp_path, "examples.sink:Csv")
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["step"], row["learning/loss"]) for row in rows] == [("r", str(i), "2.5") for i in range(3)]


def test_a_sink_that_fails_or_hangs_stops_neither_the_run_nor_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.2)
    started = time.monotonic()
    observed(tmp_path, f"{__name__}:Failing", f"{__name__}:Slow", "examples.sink:Csv")
    assert time.monotonic() - started < 10
    assert [record.step for record in read_steps(tmp_path)] == [0, 1, 2]
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 4
    said = capfd.readouterr().err
    assert said.count("ValueError: never again (test_sinks.py, line") == 3
    assert "Slow: was not done 0.2 s after the last step" in said


def test_a_sink_that_cannot_begin_stops_a_run_only_before_it_has_begun(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RaypackError, match=r"observe.sinks = '.*:Unable' failed: OSError: no room"):
        observed(tmp_path, f"{__name__}:Unable")
    observed(tmp_path)
    observed(tmp_path, f"{__name__}:Unable", steps=range(3, 4))
    assert [record.step for record in read_steps(tmp_path)] == [0, 1, 2, 3]
    assert "OSError: no room" in capfd.readouterr().err


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RaypackError, match=r"package wandb is not installed: pip install raypack\[wandb\]"):
        observed(tmp_path, "wandb")
