"""How a run ends when something ends it: Ctrl-C, a killed process, a fault on one rank. One line, records kept, and
nothing left behind."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypack.data.corpus import Corpus
from raypack.data.splits import training_stream
from raypack.observe.steps import read_steps
from raypack.observe.summary import Summary, read_summary
from raypack.planning.plan import plan_from_json
from tests.job_runs import ROOT, Started, start_job, tiny_corpus, tiny_run

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
    """The summary; every step on file must be in it."""
    summary = read_summary(run_dir(folder))
    assert summary is not None
    assert summary.steps == len({record.step for record in read_steps(run_dir(folder))})
    return summary


def failed_in_one_line(job: Started) -> str:
    assert job.wait() == 2, job.out + job.err
    assert "Traceback" not in job.err
    assert job.err.count("\n") == 1, job.err
    assert job.err.startswith("error: ")
    assert job.wait_for_family_to_end() == []
    return job.err


def test_ctrl_c_while_training_keeps_records_and_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    with start(tmp_path, corpus, run={"steps": FOREVER}) as job:
        job.wait_until(lambda: "step 2 " in job.out, "step 2")
        workers = job.family("RayTrainWorker")
        assert len(workers) == 2
        job.interrupt()
        assert job.wait(60) == 130
        assert job.err == "error: interrupted\n"
        assert job.wait_for_family_to_end() == []
    assert "interrupted" in job.out  # the summary's table
    summary = kept(tmp_path)
    assert summary.stop_reason == "interrupted"
    assert summary.steps >= 3


def test_ctrl_c_while_workers_start_ends_at_once(tmp_path: Path, corpus: Path) -> None:
    with start(tmp_path, corpus) as job:
        job.wait_until(lambda: "metrics http" in job.out, "the start of the workers")
        job.interrupt()
        assert job.wait(60) == 130
        assert job.err == "error: interrupted\n"
        assert job.wait_for_family_to_end() == []
    assert read_summary(run_dir(tmp_path)).stop_reason == "interrupted"  # type: ignore[union-attr]


def test_a_killed_worker_is_named_and_not_its_echo_on_the_others(tmp_path: Path, corpus: Path) -> None:
    with start(tmp_path, corpus, run={"steps": FOREVER}) as job:
        job.wait_until(lambda: "step 2 " in job.out, "step 2")
        os.kill(job.family("RayTrainWorker")[0], signal.SIGKILL)
        line = failed_in_one_line(job)
    assert "its process died" in line
    assert str(run_dir(tmp_path)) in line
    assert kept(tmp_path).stop_reason.startswith("failed: rank ")
    assert (run_dir(tmp_path) / "failure.txt").read_text()


BROKEN = """
import sys
sys.path.insert(0, {root!r})
import raypack.training.launch as launch
from raypack.training.job import main


def train_worker(arguments):
    import torch.distributed as dist
    import raypack.training.worker as worker

    step = worker.train_step

    def broken(trainer, work, trouble=None):
        if dist.get_rank() == 1 and work.plan.step == 2:
            raise ArithmeticError("a kernel of rank 1 broke")
        return step(trainer, work, trouble)

    worker.train_step = broken
    worker.train_worker(arguments)


launch.train_worker = train_worker
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], None, ""))
"""


def test_an_exception_on_one_rank_ends_the_run_with_it(tmp_path: Path, corpus: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(root=str(ROOT)))
    with start(tmp_path, corpus, script=script, run={"steps": FOREVER}) as job:
        line = failed_in_one_line(job)
    assert "rank 1: ArithmeticError: a kernel of rank 1 broke" in line
    assert kept(tmp_path).steps == 2
    assert "Traceback" in (run_dir(tmp_path) / "failure.txt").read_text()


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
    from tests.job_runs import TINY

    corpus = Corpus.open(path)
    from raypack.config import DataSection

    stream = training_stream(corpus, DataSection(**TINY["data"]))
    document = int(stream.step(stream.step(stream.start).after).samples.ids[0])
    offset = int(corpus.lengths[:document].sum())
    tokens = np.memmap(path / "tokens.bin", dtype="<u2", mode="r+")
    tokens[offset] = 999
    tokens.flush()
    return document


def test_a_killed_planner_comes_back_and_the_run_goes_on_with_the_same_plans(tmp_path: Path, corpus: Path) -> None:
    steps, sections = 30, {"run": {"steps": 30}, "plan": {"keep": True}}
    with start(tmp_path, corpus, **sections) as job:
        job.wait_until(lambda: "step 2 " in job.out, "step 2")
        (planner,) = job.family("PlannerActor")
        os.kill(planner, signal.SIGKILL)
        assert job.wait() == 0, job.out + job.err
        assert job.wait_for_family_to_end() == []
    assert kept(tmp_path).steps == steps
    files = sorted((run_dir(tmp_path) / "plans").iterdir())
    assert [f.name for f in files] == [f"step-{i:08d}.json" for i in range(steps)]
    plans = [plan_from_json(f.read_text()) for f in files]
    assert all(a.after == b.before for a, b in pairwise(plans))
    # What a planner in one piece would have planned.
    from raypack.config import Config
    from raypack.parallel.topology import Topology
    from raypack.planning.planner import StepPlanner
    from tests.job_runs import TINY

    data = json.loads(json.dumps(TINY))
    planner_here = StepPlanner(Config.model_validate(data), Corpus.open(corpus))
    for i, plan in enumerate(plans):
        assert plan.before is not None
        assert planner_here.plan(Topology((1, 1)), i, plan.before).plan == plan
