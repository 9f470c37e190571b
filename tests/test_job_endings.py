"""How a run ends when something ends it: Ctrl-C, a killed process, a fault on one rank. One line, records kept, and
nothing left behind."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypack.checkpoint.addresses import open_store
from raypack.checkpoint.state import newest, newest_step
from raypack.checkpoint.storage import FOLDER
from raypack.config import Config, DataSection
from raypack.data.corpus import Corpus
from raypack.data.splits import training_stream
from raypack.observe.attempts import read_attempts
from raypack.observe.record import StepRecord
from raypack.observe.steps import read_steps
from raypack.observe.summary import Summary, read_summary
from raypack.plan.plan_file import plan_from_json
from raypack.plan.topology import Topology
from raypack.planning.steps import StepPlanner
from tests.job_runs import TINY, Started, job_environment, script_before_step, start_job, tiny_corpus, tiny_run
from tests.machine import scaled

pytestmark = pytest.mark.ray

FOREVER = 10**6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_corpus(tmp_path_factory.mktemp("endings") / "corpus")


def start(folder: Path, corpus: Path, *arguments: str, script: Path | None = None, **sections: Any) -> Started:
    file = tiny_run(folder, corpus, **sections)
    more = {} if script is None else {"script": script}
    return start_job(folder, "--run", str(file), "--run.name", "r", *arguments, **more)


def run_dir(folder: Path) -> Path:
    return folder / "runs" / "r"


def kept(folder: Path) -> Summary:
    """The summary; every step on file must be in it, but for those of which a killed rank 0 took its report along."""
    summary = read_summary(run_dir(folder))
    assert summary is not None
    assert summary.steps == len({record.step for record in read_steps(run_dir(folder)) if record.sample_count})
    return summary


def kept_reason(folder: Path) -> str:
    summary = read_summary(run_dir(folder))
    assert summary is not None
    return summary.stop_reason


def failed_in_one_line(job: Started) -> str:
    assert job.wait() == 2, job.out + job.err
    assert "Traceback" not in job.err
    assert job.err.count("\n") == 1, job.err
    assert job.err.startswith("error: ")
    assert job.wait_for_family_to_end() == []
    return job.err


# -- one run through everything: Ctrl-C, damaged checkpoints, a resume, a killed planner, a killed worker --------------


@dataclass(frozen=True)
class Life:
    """What a run left that was interrupted and resumed, and whose processes were killed; read where its parts end.

    Attributes:
        interrupted: the summary after Ctrl-C.
        begin: the step of the newest checkpoint that was whole: where the resumed attempt began, and the one after it.
        end: its number of steps.
        left: command lines of processes that outlived either job.
    """

    folder: Path
    code: int
    out: str
    err: str
    interrupted: Summary
    begin: int
    end: int
    left: list[str]

    @property
    def records(self) -> list[StepRecord]:
        return read_steps(run_dir(self.folder))

    def losses(self, attempt: int) -> dict[int, tuple[float | None, str]]:
        """Loss and samples of its steps, but for those whose reports a rank took along."""
        mine = (record for record in self.records if record.attempt == attempt and record.complete)
        return {record.step: (record.loss, record.sample_ids_digest) for record in mine}


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Life:
    folder = tmp_path_factory.mktemp("life")
    # A learning rate that does not depend on the number of steps, which the second job changes.
    train = {"checkpoint_every": 3, "checkpoint_keep": 3, "lr_min_share": 1.0}
    with start(folder, corpus, run={"steps": FOREVER}, train=train, plan={"keep": True}) as job:
        job.wait_until(lambda: "step 9 " in job.out, "step 9")
        assert len(job.family("RayTrainWorker")) == 2
        job.interrupt()
        code, left = job.wait(60), job.wait_for_family_to_end()
    first = kept(folder)

    for _ in range(2):  # the newest may be ahead of the last record: one more, and some steps run twice
        damaged, _ = newest(open_store(run_dir(folder) / FOLDER))
        assert damaged is not None
        os.truncate(next(Path(damaged).glob("*.distcp")), 10)
    begin, end = newest_step(open_store(run_dir(folder) / FOLDER)), first.steps + 40
    # No checkpoint more: the next attempt begins there again, and its steps can be compared with those before it.
    arguments = ("--run.resume", "auto", "--run.steps", str(end), "--train.checkpoint_every", "1000")
    arguments = ("--run", str(run_dir(folder) / "config.toml"), *arguments)
    with start_job(folder, *arguments) as again:
        again.wait_until(lambda: f"step {begin + 2} " in again.out, "steps after the resume")
        (planner,) = again.family("PlannerActor")
        os.kill(planner, signal.SIGKILL)
        again.wait_until(lambda: f"step {begin + 12} " in again.out, "steps after the planner's death")
        os.kill(again.family("RayTrainWorker")[1], signal.SIGKILL)
        assert again.wait() == 0, again.out + again.err
        left += again.wait_for_family_to_end()
    return Life(folder, code, job.out, job.err, first, begin, end, left)


def test_after_ctrl_c_the_summary_is_kept_and_nothing_is_left(life: Life) -> None:
    assert (life.code, life.err, life.left) == (130, "error: interrupted\n", [])
    assert "interrupted" in life.out  # the summary's table
    assert (life.interrupted.stop_reason, life.interrupted.restarts) == ("interrupted", 0)


def test_a_resumed_run_goes_on_as_if_nothing_had_been(life: Life) -> None:
    assert life.begin > 0
    last = kept(life.folder)
    assert (last.stop_reason, last.steps, last.restarts) == ("finished", life.end, 2)
    assert last.replayed_steps >= life.interrupted.steps - life.begin > 0
    first, again = life.losses(0), life.losses(1)
    assert next(iter(again)) == life.begin
    twice = first.keys() & again.keys()
    assert twice
    assert all(first[step] == again[step] for step in twice)
    effective = [r for r in life.records if r.effective]
    assert [r.step for r in effective] == list(range(life.end))
    assert all(a.epoch < b.epoch or a.first_sample + a.sample_count == b.first_sample for a, b in pairwise(effective))


def test_a_worker_that_dies_is_replaced_and_the_run_ends_as_if_nothing_had_been(life: Life) -> None:
    killed, again = life.losses(1), life.losses(2)
    assert list(again) == list(range(life.begin, life.end))
    assert len(killed) >= 12
    assert all(again[step] == loss for step, loss in killed.items())
    reasons = [event.reason for event in read_attempts(run_dir(life.folder)) if event.event == "ended"]
    assert sum("its process died" in reason for reason in reasons) == 1


def test_a_killed_planner_comes_back_and_the_run_goes_on_with_the_same_plans(life: Life, corpus: Path) -> None:
    files = sorted((run_dir(life.folder) / "plans").iterdir())
    assert [f.name for f in files] == [f"step-{i:08d}.json" for i in range(life.end)]
    plans = [plan_from_json(f.read_text()) for f in files]
    assert all(a.after == b.before for a, b in pairwise(plans))
    # What a planner in one piece would have planned.
    whole = StepPlanner(Config.model_validate(TINY), Corpus.open(corpus))
    for i, plan in enumerate(plans):
        assert plan.before is not None
        assert whole.plan(Topology((1, 1)), i, plan.before).plan == plan


# -- ends, one by one --------------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_ctrl_c_while_workers_start_ends_at_once(tmp_path: Path, corpus: Path) -> None:
    with start(tmp_path, corpus) as job:
        job.wait_until(lambda: "metrics http" in job.out, "the start of the workers")
        job.interrupt()
        assert job.wait(60) == 130
        assert job.err == "error: interrupted\n"
        assert job.wait_for_family_to_end() == []
    assert kept_reason(tmp_path) == "interrupted"


@pytest.mark.slow
def test_workers_that_do_not_start_in_time_end_the_run(tmp_path: Path, corpus: Path) -> None:
    with start(tmp_path, corpus, timeouts={"start": 0.5}) as job:
        line = failed_in_one_line(job)
    assert "waited timeouts.start = 0.5 s for 2 workers to start" in line
    assert kept_reason(tmp_path).startswith("failed: waited")


@pytest.mark.rest
def test_a_killed_worker_is_named_and_not_its_echo_on_the_others(tmp_path: Path, corpus: Path) -> None:
    with start(tmp_path, corpus, run={"steps": FOREVER, "failures_max": 0}) as job:
        job.wait_until(lambda: "step 2 " in job.out, "step 2")
        os.kill(job.family("RayTrainWorker")[0], signal.SIGKILL)
        line = failed_in_one_line(job)
    assert "its process died" in line
    assert str(run_dir(tmp_path)) in line
    assert kept(tmp_path).stop_reason.startswith("failed: rank ")
    assert (run_dir(tmp_path) / "failure.txt").read_text()


@pytest.mark.rest
def test_a_rank_that_hangs_is_named_with_the_step_and_who_waited(tmp_path: Path, corpus: Path) -> None:
    patience = round(scaled(6.0))
    sections = {"run": {"steps": FOREVER, "failures_max": 0}, "timeouts": {"collective": patience}}
    with start(tmp_path, corpus, **sections) as job:
        job.wait_until(lambda: "step 2 " in job.out, "step 2")
        stopped = job.family("RayTrainWorker")[0]
        os.kill(stopped, signal.SIGSTOP)
        line = failed_in_one_line(job)
    found = re.search(
        r"rank (\d) did not answer .* \(rank (\d) waited in \w+ of step \d+: another rank did not come", line
    )
    assert found, line
    assert {found[1], found[2]} == {"0", "1"}
    assert f"timeouts.collective = {patience} s" in line
    (ended,) = [event for event in read_attempts(run_dir(tmp_path)) if event.event == "ended"]
    assert ended.ranks[int(found[1])] == "no answer"


# Read by Python itself at the start of every process: the last rank's process group takes its time, until told.
SLOW_START = """
import importlib.util, os, sys, time

NAME = "ray.train.torch.config"


class Finder:
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def slowed(module):
            load(module)
            connect = module._setup_torch_process_group

            def slow(backend, world_rank, world_size, *arguments, **more):
                open(os.path.join({folder!r}, f"pid-{{world_rank}}"), "w").write(str(os.getpid()))
                if world_rank == world_size - 1 and not os.path.exists(os.path.join({folder!r}, "quick")):
                    time.sleep(8)
                return connect(backend, world_rank, world_size, *arguments, **more)

            slow.__module__, slow.__qualname__ = NAME, connect.__qualname__
            module._setup_torch_process_group = slow

        spec.loader.exec_module = slowed
        return spec


sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_a_worker_that_dies_while_its_group_starts_leaves_no_room_taken(tmp_path: Path, corpus: Path) -> None:
    """Ray keeps what is left of such a group: the next one would wait for its room."""
    held = tmp_path / "held"
    (tmp_path / "site").mkdir()
    held.mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_START.format(folder=str(held)))
    env = job_environment(tmp_path / "home", PYTHONPATH=str(tmp_path / "site"))
    file = tiny_run(tmp_path, corpus, run={"steps": 10})
    with start_job(tmp_path, "--run", str(file), "--run.name", "r", env=env) as job:
        job.wait_until(lambda: (held / "pid-0").exists() and (held / "pid-1").exists(), "processes that connect")
        (held / "quick").touch()
        os.kill(int((held / "pid-0").read_text()), signal.SIGKILL)
        assert job.wait() == 0, job.out + job.err
        assert job.wait_for_family_to_end() == []
    assert kept(tmp_path).steps == 10


BROKEN = """
if dist.get_rank() == 1 and work.plan.step == 2:
    raise ArithmeticError("a kernel of rank 1 broke")
"""


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_the_run_with_it(tmp_path: Path, corpus: Path) -> None:
    script = script_before_step(tmp_path / "broken.py", BROKEN)
    with start(tmp_path, corpus, script=script, run={"steps": FOREVER, "failures_max": 1}) as job:
        line = failed_in_one_line(job)
    assert "rank 1: ArithmeticError: a kernel of rank 1 broke" in line
    assert (kept(tmp_path).steps, kept(tmp_path).restarts) == (2, 1)  # once more, and then no more
    assert "Traceback" in (run_dir(tmp_path) / "failure.txt").read_text()


@pytest.mark.rest
def test_a_rank_that_cannot_read_its_tokens_ends_all_ranks_with_its_reason(tmp_path: Path) -> None:
    """A fault in one rank's feed reaches the agreement: nobody waits in a collective for it."""
    path = tiny_corpus(tmp_path / "corpus")
    damaged = _damage_a_document(path)
    with start(tmp_path, path, run={"steps": FOREVER}) as job:
        line = failed_in_one_line(job)
    assert "cannot go on" in line
    assert f"document {damaged} has token id 999 of 257" in line
    assert kept(tmp_path).steps >= 1


def _damage_a_document(path: Path) -> int:
    """Put an unknown token id into a document of the second step."""
    corpus = Corpus.open(path)
    stream = training_stream(corpus, DataSection(**TINY["data"]))
    document = int(stream.step(stream.step(stream.start).after).samples.ids[0])
    offset = int(corpus.lengths[:document].sum())
    tokens = np.memmap(path / "tokens.bin", dtype="<u2", mode="r+")
    tokens[offset] = 999
    tokens.flush()
    return document
