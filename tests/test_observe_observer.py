"""The observer: records in order of settling, a summary, an endpoint file; the actor: one line for what went wrong."""

from __future__ import annotations

import io
import json
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from raypack.cli import main
from raypack.errors import RaypackError
from raypack.observe.attempts import AttemptLog, read_attempts, sentence
from raypack.observe.observer import RunObserver, cause_of_death
from raypack.observe.reporter import Pulse
from raypack.observe.steps import next_attempt, read_steps
from raypack.observe.summary import read_summary, summarise
from raypack.report.console import summary_table
from tests.observe_cases import record, report


@pytest.fixture
def observer(tmp_path: Path):
    made = RunObserver(str(tmp_path / "runs" / "r"), "r", notes=("nodes are simulated",))
    yield made
    made.finish("test over")


def _steps(observer: RunObserver, attempt: int, steps: range, world: int = 2) -> None:
    for step in steps:
        for rank in range(world):
            observer.report(report(rank, step, attempt, world))


def _metrics(observer: RunObserver) -> str:
    with urllib.request.urlopen(observer.address(), timeout=10) as reply:
        return reply.read().decode()


def test_a_run_is_one_file_one_summary_one_scrape_target(observer: RunObserver) -> None:
    _steps(observer, 0, range(3))
    observer.report(report(0, step=3))
    assert observer.latest().step == 2
    assert 'raypack_tokens_total{run="r"} 15.0' in _metrics(observer)
    run_dir = observer.run_dir
    endpoint = json.loads((run_dir / "metrics.json").read_text())
    assert endpoint["url"] == observer.address()
    assert endpoint["serving"] is True
    (entry,) = json.loads((run_dir.parent / ".prometheus" / "r.json").read_text())
    assert entry["targets"] == [f"127.0.0.1:{endpoint['port']}"]

    summary = observer.finish("steps done")
    assert observer.finish("again") == summary
    assert read_summary(run_dir) == summary
    assert (summary.stop_reason, summary.incomplete_steps, summary.notes) == ("steps done", 1, ["nodes are simulated"])
    assert [(r.step, r.complete) for r in read_steps(run_dir)] == [(0, True), (1, True), (2, True), (3, False)]
    assert json.loads((run_dir / "metrics.json").read_text())["serving"] is False
    assert not (run_dir.parent / ".prometheus" / "r.json").exists()
    with pytest.raises(urllib.error.URLError):
        _metrics(observer)


def test_a_restart_counts_once_and_its_replayed_samples_are_counted(observer: RunObserver) -> None:
    observer.begin(0, 2)
    _steps(observer, 0, range(4))
    observer.begin(1, 1)
    _steps(observer, 1, range(2, 6), world=1)
    text = _metrics(observer)
    assert 'raypack_restarts_total{run="r"} 1.0' in text
    assert 'raypack_world_size{run="r"} 1.0' in text
    assert 'raypack_samples_total{run="r"} 16.0' in text
    assert 'raypack_samples_replayed_total{run="r"} 4.0' in text
    summary = observer.finish()
    assert (summary.steps, summary.replayed_steps, summary.restarts, summary.worlds) == (6, 2, 1, [2, 1])


def test_the_same_directory_goes_on_with_the_next_attempt(tmp_path: Path) -> None:
    first = RunObserver(str(tmp_path), "r")
    _steps(first, 0, range(3))
    first.finish("interrupted")
    assert next_attempt(tmp_path) == 1
    second = RunObserver(str(tmp_path), "r")
    second.begin(1, 2)
    _steps(second, 1, range(2, 4))
    assert 'raypack_samples_replayed_total{run="r"} 2.0' in _metrics(second)
    summary = second.finish()
    assert (summary.steps, summary.restarts, summary.replayed_steps) == (4, 1, 1)


def test_an_observer_that_was_restarted_itself_counts_no_restart_of_the_run(tmp_path: Path) -> None:
    first = RunObserver(str(tmp_path), "r")
    _steps(first, 0, range(3))
    second = RunObserver(str(tmp_path), "r")  # the first was killed: no finish
    _steps(second, 0, range(3, 5))
    assert 'raypack_restarts_total{run="r"} 0.0' in _metrics(second)
    assert 'raypack_samples_replayed_total{run="r"} 0.0' in _metrics(second)
    summary = second.finish()
    assert (summary.steps, summary.restarts, summary.last_step) == (5, 0, 4)
    first.finish()


def test_since_hands_out_each_record_once_and_is_bounded(tmp_path: Path) -> None:
    observer = RunObserver(str(tmp_path), "r", recent_max=4)
    _steps(observer, 0, range(2))
    count, records = observer.since(0)
    assert [r.step for r in records] == [0, 1]
    assert observer.since(count) == (2, [])
    _steps(observer, 0, range(2, 12))
    count, records = observer.since(count)
    assert count == 12
    assert [r.step for r in records] == [8, 9, 10, 11]
    observer.finish()


def test_the_last_pulse_is_kept_with_its_age(tmp_path: Path) -> None:
    observer = RunObserver(str(tmp_path), "r")
    assert observer.pulse() is None
    for step in range(2):
        observer.beat(Pulse(0, step, 0.1, "forward", "", (), over=False))
    pulse, age = observer.pulse()
    assert pulse.step == 1
    assert 0 <= age < 60
    observer.finish()


def test_a_bad_report_is_a_line_on_stderr_and_no_more(observer: RunObserver, capsys: pytest.CaptureFixture) -> None:
    observer.report("nonsense")
    observer.report(report(0, world=1, exchanged={("nowhere", "intra"): 5}))
    _steps(observer, 0, range(1, 2))
    assert observer.latest().step == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 2
    assert "nowhere" in errors[1]


def test_a_port_in_use_or_a_bad_place_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RaypackError, match=rf"observe\.port = {port}"):
            RunObserver(str(tmp_path / "r"), "r", "127.0.0.1", port)
    assert not (tmp_path / "r").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RaypackError, match=r"run\.root"):
        RunObserver(str(tmp_path / "file" / "r"), "r")


def test_summary_table_holds_the_notes_and_survives_an_empty_run() -> None:
    text = io.StringIO()
    Console(file=text, width=100).print(
        summary_table(summarise([record(0), record(1)], "r", "finished", ["nodes are simulated"]))
    )
    assert "nodes are simulated" in text.getvalue()
    assert "2.5000 -> 2.5000" in text.getvalue()
    Console(file=io.StringIO()).print(summary_table(summarise([])))


def test_inspect_reads_a_run_that_finished_and_one_that_was_killed(tmp_path: Path) -> None:
    observer = RunObserver(str(tmp_path / "r"), "r")
    _steps(observer, 0, range(3))
    killed = CliRunner().invoke(main, ["inspect", str(tmp_path / "r")])
    assert killed.exit_code == 0, killed.output
    assert "killed" in killed.output
    observer.finish("steps done")
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "r"), "--json", "-"])
    data = json.loads(done.stdout)
    assert (data["steps"], data["stop_reason"], data["first_loss"]) == (3, "steps done", 2.5)
    assert data == json.loads((tmp_path / "r" / "summary.json").read_text())


def test_inspect_of_no_run_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_restarted_observer_goes_on_with_its_counters_and_knows_what_is_on_record(tmp_path: Path) -> None:
    first = RunObserver(str(tmp_path), "r", corpus={"kept": 7, "truncated": 1})
    _steps(first, 0, range(3))
    first.report(report(0, step=3))  # rank 1's had not come when the observer was killed
    second = RunObserver(str(tmp_path), "r")
    assert 'raypack_tokens_total{run="r"} 15.0' in _metrics(second)
    assert second.receipt(0).settled == (0, 1, 2)
    assert second.receipt(0).instance != first.instance
    _steps(second, 0, range(1, 4))  # all that the ranks still hold, sent again
    assert 'raypack_tokens_total{run="r"} 20.0' in _metrics(second)
    assert [(r.step, r.complete) for r in read_steps(tmp_path)] == [(step, True) for step in range(4)]
    assert second.since(3)[0] == 4
    assert [r.step for r in second.since(3)[1]] == [3], "a follower of the first goes on with the second"
    second.finish()
    assert 'raypack_corpus_samples{fate="truncated",run="r"} 1.0' in _metrics(first)
    first.finish()


def test_a_restarted_observer_knows_when_the_run_began_and_what_could_not_be_saved(tmp_path: Path) -> None:
    first = RunObserver(str(tmp_path), "r")
    first._started -= 600
    _steps(first, 0, range(2))
    first.checkpoint_failed(0, "the checkpoint of step 2: no space left on device")
    AttemptLog(tmp_path).add("started", 0, world=2)
    event, started = read_attempts(tmp_path)
    assert sentence(event) == "attempt 0 could not save: the checkpoint of step 2: no space left on device"
    second = RunObserver(str(tmp_path), "r")
    assert second._started == pytest.approx(first._started, abs=1e-3)
    text = _metrics(second)
    assert 'raypack_checkpoint_failures_total{run="r"} 1.0' in text
    (begun,) = re.findall(r'raypack_attempt_timestamp_seconds{run="r"} (.*)', text)
    assert float(begun) == started.time
    summary = second.finish()
    assert summary.wall_seconds == pytest.approx(600, abs=30)
    assert summary.goodput == pytest.approx(6 / summary.wall_seconds)
    first.finish()


def test_the_eta_needs_the_settings_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\nsteps = 9\n")
    observer = RunObserver(str(tmp_path), "r")
    _steps(observer, 0, range(1))
    assert 'raypack_eta_seconds{run="r"} 24.0' in _metrics(observer), "8 steps of 3 s are left"
    observer.finish()


def test_a_record_of_a_large_world_is_whole_for_the_endpoint_and_small_in_the_file(observer: RunObserver) -> None:
    for rank in range(100):
        observer.report(report(rank, 0, world=100, host=f"host-{rank // 4}"))
    assert _metrics(observer).count("raypack_rank_busy_seconds{") == 100
    (line,) = (observer.run_dir / "steps.jsonl").read_text().splitlines()
    assert len(line) < 3000
    assert observer.latest().across_ranks("tokens").worst[0] == (0, "host-0", 3.0)


def test_a_sink_that_fails_stops_no_other(observer: RunObserver, capsys: pytest.CaptureFixture) -> None:
    observer._exporter.update = lambda *_: 1 / 0
    _steps(observer, 0, range(2))
    assert [r.step for r in read_steps(observer.run_dir)] == [0, 1]
    assert capsys.readouterr().err.count("ZeroDivisionError") == 2


def test_two_runs_on_one_host_stand_beside_each_other(tmp_path: Path) -> None:
    both = [RunObserver(str(tmp_path / "runs" / name), name) for name in ("a", "b")]
    for count, each in enumerate(both, start=1):
        _steps(each, 0, range(count))
    for count, each in enumerate(both, start=1):
        assert f'raypack_tokens_total{{run="{each.run_name}"}} {5.0 * count}' in _metrics(each)
    entries = [json.loads(file.read_text()) for file in sorted((tmp_path / "runs" / ".prometheus").glob("*.json"))]
    targets = {entry["targets"][0] for (entry,) in entries}
    assert len(targets) == 2
    for each in both:
        each.finish()


def test_the_nodes_own_address_when_asked(tmp_path: Path) -> None:
    observer = RunObserver(str(tmp_path / "runs" / "r"), "r", bind="node")
    host = json.loads((observer.run_dir / "metrics.json").read_text())["address"]
    assert host != "127.0.0.1"
    assert 'raypack_step_seconds_count{run="r"} 0.0' in _metrics(observer)
    observer.finish()


def test_the_cause_of_a_death_is_its_exception_whatever_frames_are_around() -> None:
    text = (
        "The actor died because of an error raised in its creation task, ray::A.__init__() (pid=1)\n"
        '  File "a.py", line 7, in __init__\n    open(path)\n    ^^^^^^^^^^\n'
        '  File "b.py", line 3, in open\n    raise OSError(what)\nOSError: disk\nhas no room\n'
    )
    assert cause_of_death(text) == "OSError: disk has no room"
    assert cause_of_death("The actor is unavailable.").startswith("The actor is unavailable; its log is in")
