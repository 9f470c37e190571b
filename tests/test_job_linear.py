"""`jobs/train_linear.py` from end to end: a hybrid of linear layers and gathered keys learns, and says what it sent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raypack.config.runfile import load_run
from raypack.observe.steps import read_steps
from raypack.observe.summary import read_summary
from tests.job_runs import ROOT, start_job, tiny_corpus, tiny_run

SCRIPT = ROOT / "jobs" / "train_linear.py"
STEPS = 8


@pytest.mark.ray
@pytest.mark.rest
def test_a_hybrid_of_linear_and_full_layers_learns_and_reports_its_gathers(tmp_path: Path) -> None:
    model = {
        "name": "linear", "pattern": "LLLF", "layers": 4, "experts": 0, "ffn_width": 32, "linear_decay": "gate",
        "linear_feature": "silu", "linear_conv": 4, "linear_chunk": 16,
    }  # fmt: skip
    file = tiny_run(
        tmp_path,
        tiny_corpus(tmp_path / "corpus"),
        model=model,
        plan={"policy": "joint", "attention": "kv_gather", "rank_tokens_max": 200},
        run={"steps": STEPS},
        train={"lr": 1e-2},
    )
    with start_job(tmp_path, "--run", str(file), "--run.name", "r", script=SCRIPT) as job:
        assert job.wait() == 0, job.out + job.err
    records = read_steps(tmp_path / "runs" / "r")
    assert len(records) == STEPS
    losses = [record.loss for record in records]
    assert np.mean(losses[-2:]) < np.mean(losses[:2]) - 0.1
    for record in records:
        assert record.parent_widths == record.child_widths
        assert not any(sum(scopes.values()) for scopes in record.bytes.values())
        assert sum(record.bytes_static["full_in"].values()) > 0, "the baseline exchanges heads"
    wide = [record for record in records if 2 in record.child_widths]
    assert wide
    for record in wide:
        for op in ("state_gather", "kv_gather"):
            assert record.collective_bytes[op]["inter"] > 0
    summary = read_summary(tmp_path / "runs" / "r")
    assert summary is not None
    assert summary.stop_reason == "finished"


@pytest.mark.parametrize("name", ["linear_local", "linear_gpu"])
def test_run_files_of_the_linear_job_load(name: str) -> None:
    config = load_run([], name)
    assert config.model.kinds.startswith("LLLF")
    assert config.plan.attention in ("auto", "kv_gather")
