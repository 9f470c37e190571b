"""What a step tells of itself: seconds by layer kind and by site, and one trace of all ranks with everything named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from raypack.config import TrainSection
from raypack.model.stopwatch import Stopwatch
from raypack.observe.metrics import DIRECTION, LAYER
from raypack.observe.trace import merge_traces, recording, write_trace
from raypack.plan.plan import Placement, Plan, Round
from raypack.plan.topology import Block, Topology
from raypack.training.step import train_step
from raypack.training.work import prepare
from tests.ranks import Case, loader, make_trainer, tiny_model

pytestmark = pytest.mark.pool


def place(sample: int, length: int, parent: tuple[int, int], child: tuple[int, int]) -> Placement:
    return Placement(sample, length, Block(*parent), Block(*child), length - 1)


PLAN = Plan(
    nodes=(1, 1),
    rounds=(
        Round((place(0, 60, (0, 2), (0, 1)), place(1, 31, (0, 2), (1, 1)))),
        Round((place(2, 40, (0, 2), (0, 2)),)),
    ),
)
CASE = Case(tiny_model(pattern="FS", layers=4), TrainSection(dtype="float32", chunk_tokens=64))


def traced_on_rank(rank: int, world: int, run_dir: str) -> tuple[dict, dict, dict]:
    trainer = make_trainer(CASE, PLAN.topology, poison=False)
    trainer.watch = Stopwatch(torch.device("cpu"))
    work = prepare(PLAN, PLAN.topology, rank, CASE.model, loader(CASE))
    train_step(trainer, work)
    trainer.wire.ledger.take()
    with recording(True) as trace:
        result = train_step(trainer, work)
    assert trace is not None
    write_trace(trace, Path(run_dir), 7, rank, PLAN.topology, trainer.groups.host)
    return result.phases, result.layers, dict(trainer.wire.ledger.take().seconds)


@pytest.fixture(scope="module")
def traced(processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    return folder, processes.run(2, traced_on_rank, str(folder))


def test_seconds_of_layer_kinds_fill_forward_and_backward(traced) -> None:
    for phases, layers, _ in traced[1]:
        assert {part for part, _ in layers} == {"embed", "full", "sparse", "head"}
        for part, direction in layers:
            LAYER.check(part)
            DIRECTION.check(direction)
        both = phases["forward"] + phases["backward"] + phases["exchange"]
        # The first mark of a direction is the last one before it, a moment earlier than the phase.
        assert 0.7 * both <= sum(layers.values()) <= 1.05 * both + 2e-3
        assert all(seconds > 0 for seconds in layers.values())


def test_seconds_by_site_are_there_for_every_site_with_traffic(traced) -> None:
    for phases, layers, sites in traced[1]:
        assert set(sites) == {"full_in", "full_out", "sparse_in", "sparse_out"}
        assert sum(sites.values()) == pytest.approx(phases["exchange"])
        assert 0 < phases["exchange"] < sum(layers.values())


def test_one_trace_holds_all_ranks_with_phases_layers_and_exchanges_named(traced) -> None:
    folder = traced[0] / "traces"
    assert [file.name for file in folder.iterdir()] == ["step-7.json"], "nothing else is left"
    events = json.loads((folder / "step-7.json").read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "process_name"}
    assert named[0] == "rank 0 (node 0)"
    assert named[1] == "rank 1 (node 1)"
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank and e.get("ph") == "X"]
        names = [e["name"] for e in mine]
        for wanted in ("agree", "forward", "backward", "gradient_reduce", "optimizer", "layer full", "layer sparse"):
            assert wanted in names, wanted
        # Two full layers in two rounds, forward and backward; of sparse ones only the second round's sample is wide.
        assert names.count("exchange full_in") == names.count("exchange full_out") == 8
        assert names.count("exchange sparse_in") == names.count("exchange sparse_out") == 4
    spans = {rank: next(e for e in events if e["pid"] == rank and e["name"] == "agree") for rank in (0, 1)}
    first, second = spans[0], spans[1]
    # The ranks meet in the agreement: on one time axis it overlaps.
    assert first["ts"] < second["ts"] + second["dur"]
    assert second["ts"] < first["ts"] + first["dur"]
    flows = [(e["pid"], e["ph"], e["id"]) for e in events if e.get("ph") in ("s", "f")]
    assert len({(phase, id_) for _, phase, id_ in flows}) == len(flows), "ids of two ranks never meet"


def test_a_rank_that_could_not_write_is_missing_and_no_more(tmp_path: Path) -> None:
    event = {"ph": "X", "name": "forward", "pid": 99, "tid": 1, "ts": 5.0, "dur": 1.0}
    for rank, base in ((0, 2_000_000), (2, 1_000_000)):
        content = {"baseTimeNanoseconds": base, "traceEvents": [event]}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content))
    merge_traces(tmp_path, Topology((2, 2)), tmp_path / "out.json")
    spans = {
        e["pid"]: e["ts"] for e in json.loads((tmp_path / "out.json").read_text())["traceEvents"] if e["ph"] == "X"
    }
    assert spans == {0: 1005.0, 2: 5.0}


def test_no_recording_costs_nothing_and_gives_nothing() -> None:
    with recording(False) as trace:
        assert trace is None
