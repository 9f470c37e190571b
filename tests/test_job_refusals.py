"""What bad input gets: one line that names the value and what to change, exit code 2, and nothing is started."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from raypack.config import Config
from raypack.config.runfile import load_run
from raypack.config.settings import settings_of
from raypack.driver import preflight
from raypack.driver.job import main
from raypack.errors import RaypackError
from tests.job_runs import start_job, tiny_corpus, tiny_run

SECONDS = 60.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_corpus(tmp_path_factory.mktemp("refusals") / "corpus")


@pytest.fixture
def refused(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Calls the job in this process, which must refuse before it starts anything; gives the line."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def call(*arguments: str, **sections: dict[str, Any]) -> str:
        file = tiny_run(tmp_path, corpus, **sections)
        assert main(["--run", str(file), *arguments]) == 2
        out, err = capsys.readouterr()
        assert [line.split("  ")[0] for line in out.splitlines()] == ["torch and Ray", "corpus", "checks"][
            : out.count("\n")
        ]
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert not list((tmp_path / "runs").rglob("*.jsonl"))
        return err

    return call


def test_an_unknown_flag_is_refused_before_torch_and_ray_are_imported(tmp_path: Path) -> None:
    with start_job(tmp_path, "--run.stepz", "3") as job:
        assert job.wait(SECONDS) == 2
        assert job.err == "error: unknown flag --run.stepz: did you mean --run.steps?\n"
        assert job.out == ""


def test_no_corpus_at_the_path(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no corpus at" in refused("--data.corpus", str(tmp_path / "none"))


def test_a_folder_that_is_no_corpus(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "is no corpus" in refused("--data.corpus", str(tmp_path / "folder"))


def test_a_corpus_of_another_program(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "corpus.json").write_text(json.dumps({"format": "other", "version": 1}))
    assert "is no raypack corpus" in refused("--data.corpus", str(tmp_path / "foreign"))


def test_a_corpus_that_lost_its_end(refused: Callable[..., str], tmp_path: Path) -> None:
    cut = tiny_corpus(tmp_path / "cut", documents=20)
    os.truncate(cut / "tokens.bin", (cut / "tokens.bin").stat().st_size - 2)
    assert "tokens.bin has" in refused("--data.corpus", str(cut))


def test_a_corpus_without_a_usable_document(refused: Callable[..., str], tmp_path: Path) -> None:
    long = tiny_corpus(tmp_path / "long", documents=3)
    assert "max_sample_tokens" in refused(
        "--data.corpus", str(long), "--data.long_documents", "skip", "--data.max_sample_tokens", "2"
    )


def test_token_ids_that_the_model_does_not_know(refused: Callable[..., str]) -> None:
    line = refused("--model.vocabulary", "256")
    assert "model.vocabulary = 256" in line
    assert "up to 256" in line


def test_a_longest_sample_that_fits_no_block(refused: Callable[..., str]) -> None:
    line = refused("--data.max_sample_tokens", "20000")
    assert "data.max_sample_tokens = 20000" in line
    assert "8192" in line  # the cap
    assert "10000" in line  # the cap that would do


def test_an_unknown_cluster_preset(refused: Callable[..., str]) -> None:
    assert "no cluster preset 'moon': there are" in refused("--plan.cluster", "moon")


def test_a_run_root_that_is_a_file(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "choose another run.root" in refused("--run.root", str(tmp_path / "file"))


def test_nothing_to_resume_from(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no checkpoint directory" in refused("--run.resume", str(tmp_path / "none"))
    (tmp_path / "half").mkdir()
    assert "is no complete checkpoint" in refused("--run.resume", str(tmp_path / "half"))


def test_a_checkpoint_of_another_model_corpus_or_of_a_run_that_is_over(
    refused: Callable[..., str], tmp_path: Path, corpus: Path
) -> None:
    from raypack.checkpoint.state import RunState, model_digest
    from raypack.config import ModelConfig
    from raypack.data.corpus import Corpus
    from raypack.plan.plan import StreamState
    from tests.job_runs import TINY

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    model, prints = model_digest(ModelConfig(**TINY["model"])), Corpus.open(corpus).fingerprint

    def write(step: int, model: str, fingerprint: str) -> None:
        (folder / "state.json").write_text(RunState(step, StreamState(0, 0, 9), model, fingerprint).to_json())

    write(3, "other", prints)
    assert "holds another model" in refused("--run.resume", str(folder))
    write(3, model, "other")
    assert "was trained on another corpus" in refused("--run.resume", str(folder))
    write(6, model, prints)
    assert "has 6 steps already, run.steps = 6" in refused("--run.resume", str(folder))


@pytest.fixture
def http_port() -> Iterator[int]:
    """Something that listens and is no Ray."""

    class Refuse(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_ray_at_the_address_is_said_within_seconds(refused: Callable[..., str], http_port: int) -> None:
    started = time.monotonic()
    assert "no Ray cluster at 127.0.0.1:" in refused("--run.ray_address", f"127.0.0.1:{_free_port()}")
    line = refused("--run.ray_address", f"127.0.0.1:{http_port}")
    assert "something listens there, but no Ray head" in line
    assert "must be HOST:PORT" in refused("--run.ray_address", "nonsense")
    assert "Ray Client" in refused("--run.ray_address", "ray://127.0.0.1:10001")
    assert time.monotonic() - started < SECONDS


def test_more_gpus_than_the_machine_has(refused: Callable[..., str]) -> None:
    assert "need 4096 GPU (1 each), this machine has " in refused(
        "--topology.gpus_per_worker", "1", "--topology.workers", "4096", "--topology.nodes", "[]"
    )


def test_gpus_that_would_read_the_embedded_corpus(refused: Callable[..., str]) -> None:
    line = refused("--topology.gpus_per_worker", "1", "--data.corpus=")
    assert "gpus_per_worker = 1 and no data.corpus" in line
    assert "raypack data build" in line


def test_gpus_on_a_machine_without_any(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 0)
    assert "set topology.gpus_per_worker = 0" in refused("--topology.gpus_per_worker", "1")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            ["64", "--topology.nodes", "[32, 32]"],
            ["2 cores", '--topology.workers 16 --topology.nodes "[8, 8]" or less'],
        ),
        (
            ["64", "--topology.nodes", "[]", "--topology.cpus_per_worker", "0.1"],
            ["26 GB", "6 GB", "--topology.workers 16"],
        ),
        (["8", "--topology.nodes", "[]", "--topology.cpus_per_worker", "64"], ["a lower topology.cpus_per_worker"]),
    ],
    ids=["cores", "memory", "cores of one"],
)
def test_more_workers_than_the_machine_carries(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], texts: list[str]
) -> None:
    monkeypatch.setattr(preflight, "cores", lambda: 2)
    monkeypatch.setattr(preflight, "memory_bytes", lambda: 8e9)
    file = tiny_run(tmp_path, corpus)
    config = load_run(["--run", str(file), "--topology.workers", *arguments])
    with pytest.raises(RaypackError) as refusal:  # not through the job, which would start them all where this fails
        preflight.check_machine(config)
    assert all(text in str(refusal.value) for text in texts), refusal.value


def test_eight_workers_may_share_two_cores_and_four_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "cores", lambda: 2)
    monkeypatch.setattr(preflight, "memory_bytes", lambda: 4e9)
    preflight.check_machine(Config())


NONSENSE = [
    "nan",
    "-inf",
    "1e400",
    "-1",
    "0",
    "9" * 20,
    "1e-320",
    "",
    "\0",
    "\udcff",
    "n" * 300,
    "~nobody-here/x",
    "[1, 1",
]


@pytest.mark.parametrize("section", list(Config.model_fields))
def test_nonsense_in_any_setting_is_one_line_or_a_run_that_could_start(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    from raypack.driver.preflight import prepare_run

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file, said = tiny_run(tmp_path, corpus), []
    for setting in settings_of(Config):
        for value in NONSENSE if setting.path.startswith(f"{section}.") else ():
            try:
                prepare_run(load_run(["--run", str(file), f"--{setting.path}={value}"]))
            except RaypackError as error:
                said.append(str(error))
    assert said
    assert [text for text in said if "\n" in text or len(text) > 500] == []


def test_a_metrics_address_of_another_machine(refused: Callable[..., str]) -> None:
    assert "cannot serve /metrics" in refused("--observe.bind", "192.0.2.1")


def test_a_metrics_port_in_use(refused: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused("--observe.port", port)
    assert f"observe.port = {port}" in line
    assert "in use" in line
