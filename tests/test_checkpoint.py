"""Checkpoints: complete or not there, and a run goes on from one as if it had never stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from raypack.config import TrainSection
from raypack.errors import RaypackError
from raypack.parallel.topology import Block
from raypack.planning.plan import Placement, Plan, Round, StreamState
from raypack.training import checkpoint
from raypack.training.checkpoint import RunState, load, model_digest, newest, save
from raypack.training.optimizer import build_optimizer
from raypack.training.parameters import build_parameters
from raypack.training.replicas import check_replicas
from raypack.training.step import Trainer, train_step
from raypack.training.work import prepare
from tests.ranks import Case, full, loader, make_trainer, tiny_model

# A world of one saves without a process group, which is what it wants.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PLAN = Plan(
    nodes=(2, 1),
    rounds=(
        Round((Placement(0, 30, Block(0, 3), Block(0, 2), 29), Placement(1, 7, Block(2, 1), Block(2, 1), 6))),
        Round((Placement(2, 12, Block(0, 2), Block(1, 1), 11),)),
    ),
)
STREAM = StreamState(5, 1, 7)
WHOLE = RunState(2, STREAM, "model", "corpus")


def steps(trainer: Trainer, case: Case, count: int) -> list[float]:
    work = prepare(PLAN, PLAN.topology, dist.get_rank(), case.model, loader(case))
    return [train_step(trainer, work).loss for _ in range(count)]


def resumed_on_rank(rank: int, world: int, case: Case, folder: str) -> tuple[list[float], list[float], bool, RunState]:
    """Losses of two steps after a save: of the trainer that goes on, of one that loads; whether their weights agree."""
    trainer = make_trainer(case, PLAN.topology, poison=False)
    steps(trainer, case, 2)
    check_replicas(trainer, 2)
    saved = save(trainer, Path(folder), WHOLE, keep=2)
    went_on = steps(trainer, case, 2)
    other = make_trainer(replace(case, seed=case.seed + 1), PLAN.topology, poison=False)
    state = load(other, saved)
    check_replicas(other, 2)
    loaded = steps(other, case, 2)
    pairs = zip(trainer.parameters.masters.values(), other.parameters.masters.values(), strict=True)
    biases = zip(trainer.parameters.model.buffers(), other.parameters.model.buffers(), strict=True)
    same = all(np.array_equal(full(a), full(b)) for a, b in [*pairs, *biases])
    return went_on, loaded, same, state


@pytest.mark.pool
@pytest.mark.parametrize("shard", ["none", "world"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bit_identical_to_one_that_never_stopped(
    pool: Any, tmp_path: Path, shard: str, dtype: str
) -> None:
    case = Case(tiny_model(), TrainSection(dtype=dtype, shard=shard, chunk_tokens=16))  # type: ignore[arg-type]
    for went_on, loaded, same, state in pool.run(3, resumed_on_rank, case, str(tmp_path)):
        assert went_on == loaded
        assert same
        assert (state.step, state.stream) == (2, STREAM)
    assert newest(tmp_path) == tmp_path / "checkpoints" / "step-00000002"


def failing_on_rank(rank: int, world: int, case: Case, folder: str) -> str:
    """Rank 1 cannot write its file."""
    trainer = make_trainer(case, PLAN.topology, poison=False)

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", full_disk)
        try:
            save(trainer, Path(folder), WHOLE, keep=2)
        except RaypackError as error:
            return str(error)
    return ""


@pytest.mark.pool
def test_a_rank_that_cannot_write_is_one_error_on_all_ranks_and_no_checkpoint(pool: Any, tmp_path: Path) -> None:
    texts = pool.run(3, failing_on_rank, Case(tiny_model()), str(tmp_path))
    assert all("rank 1" in text and "No space left on device" in text and "\n" not in text for text in texts)
    assert newest(tmp_path) is None


def drifted_on_rank(rank: int, world: int, case: Case) -> str:
    trainer = make_trainer(case, PLAN.topology, poison=False)
    check_replicas(trainer, 0)
    if rank == 2:
        with torch.no_grad():
            next(iter(trainer.parameters.masters.values())).view(-1)[0] += 1e-7
    try:
        check_replicas(trainer, 4)
    except RaypackError as error:
        return str(error)
    return ""


@pytest.mark.pool
def test_a_replica_that_drifted_by_one_bit_is_named_on_all_ranks(pool: Any) -> None:
    texts = pool.run(3, drifted_on_rank, Case(tiny_model(), TrainSection(chunk_tokens=16)))
    assert len(set(texts)) == 1
    assert "rank 2 brings weights" in texts[0]
    assert "after 4 steps" in texts[0]


def lone_trainer(seed: int = 0) -> Trainer:
    """A trainer in a world of one, outside any process group."""
    train, device = TrainSection(), torch.device("cpu")
    parameters = build_parameters(tiny_model(), train, seed, None, device)
    return Trainer(parameters, build_optimizer(parameters.masters, train), train, 9, None, None, device)  # type: ignore[arg-type]


def written(folder: Path, *at: int, keep: int = 9) -> list[Path]:
    trainer = lone_trainer()
    return [save(trainer, folder, RunState(step, STREAM, "model", "corpus"), keep) for step in at]


def test_older_checkpoints_go_and_the_newest_ones_stay(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


def _truncate(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)


def _change_state(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**data, **changes}))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        lambda folder: next(folder.glob("*.distcp")).unlink(),
        lambda folder: (folder / ".metadata").unlink(),
        lambda folder: (folder / "state.json").unlink(),
        lambda folder: os.truncate(folder / "state.json", 40),
        lambda folder: (folder / "state.json").write_text("[]"),
        _change_state(stream={"seed": 0}),
        _change_state(version=2),
        _change_state(step="soon"),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_and_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    older, damaged = written(tmp_path, 1, 2)
    damage(damaged)
    assert newest(tmp_path) == older
    with pytest.raises(RaypackError, match=r"step-00000002 is no complete checkpoint"):
        load(lone_trainer(), damaged)


def test_metadata_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (folder,) = written(tmp_path, 1)
    (folder / ".metadata").write_bytes(b"x" * (folder / ".metadata").stat().st_size)
    with pytest.raises(RaypackError, match=r"the checkpoint .*step-00000001"):
        load(lone_trainer(), folder)


def _dies(folder: str, point: str) -> None:
    """Save step 2 over an older step 1 with keep = 1, and die at `point`, like a process that is killed."""
    moves = {"before the rename": 0, "between new and old": 1}
    if point in moves:
        done: list[Any] = []

        def replace_until(*names: Any) -> None:
            if len(done) == moves[point]:
                os._exit(9)
            done.append(names)
            os.rename(*names)

        checkpoint.os.replace = replace_until  # type: ignore[attr-defined, assignment]
    elif point == "before publishing":
        checkpoint._publish = lambda *_: os._exit(9)  # type: ignore[assignment]
    elif point == "while the old one goes":

        def half(gone: Path) -> None:
            next(Path(gone).iterdir()).unlink()
            os._exit(9)

        checkpoint.shutil.rmtree = half  # type: ignore[attr-defined, assignment]
    written(Path(folder), 2, keep=1)
    os._exit(1)


@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("before publishing", 1),
        ("before the rename", 1),
        ("between new and old", 2),
        ("while the old one goes", 2),
    ],
)
def test_a_kill_at_any_moment_leaves_nothing_half_that_opens(tmp_path: Path, point: str, left: int) -> None:
    written(tmp_path, 1)
    process = multiprocessing.get_context("fork").Process(target=_dies, args=(str(tmp_path), point))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    found = newest(tmp_path)
    assert found is not None
    assert load(lone_trainer(seed=1), found).step == left
    written(tmp_path, 3, keep=1)  # what was left behind is in nobody's way, and goes
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    shutil.copytree(written(tmp_path, 4)[0], tmp_path / "checkpoints" / ".partial-step-00000009")
    assert newest(tmp_path) == tmp_path / "checkpoints" / "step-00000004"


def test_a_models_name_is_no_part_of_what_its_weights_belong_to() -> None:
    model = tiny_model(name="a")
    assert model_digest(model) == model_digest(tiny_model(name="b", preset="c"))
    assert model_digest(model) != model_digest(tiny_model(window=6))
