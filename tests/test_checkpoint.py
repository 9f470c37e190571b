"""Checkpoints of ranks: written while training goes on, read at any world size, one error for all."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from raypack.checkpoint.addresses import open_store
from raypack.checkpoint.checkpoints import Checkpoints, load
from raypack.checkpoint.objects import ArrowReader
from raypack.checkpoint.staging import share, tensors_of
from raypack.checkpoint.state import RunState, newest, newest_step
from raypack.checkpoint.storage import LocalStore
from raypack.config import TrainSection
from raypack.errors import RaypackError
from raypack.training.replicas import check_replicas
from tests.checkpoint_cases import (
    STREAM,
    WAIT,
    HeldStore,
    loaded_on_rank,
    lone_trainer,
    of,
    plan_for,
    same,
    saved_on_rank,
    state_at,
    steps,
    whole,
    written,
)
from tests.ranks import Case, make_trainer, tiny_model

# A world of one saves without a process group, which is what it wants.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHARDS = ["none", "world"]


def resumed_on_rank(rank: int, world: int, case: Case, root: str) -> tuple[list[float], list[float], bool, RunState]:
    """Losses of two steps after a save: of the trainer that goes on, of one that loads; whether their weights agree."""
    trainer = make_trainer(case, plan_for(world).topology, poison=False)
    steps(trainer, case, 2)
    check_replicas(trainer, 2)
    store = open_store(root)
    checkpoints = Checkpoints(trainer, store, keep=2)
    checkpoints.save(state_at(2))
    went_on = steps(trainer, case, 2)
    checkpoints.settle(WAIT)
    other = make_trainer(replace(case, seed=case.seed + 1), plan_for(world).topology, poison=False)
    state = load(other, newest(store)[0] or "")
    check_replicas(other, 2)
    loaded = steps(other, case, 2)
    return went_on, loaded, same(whole(trainer), whole(other)), state


@pytest.mark.pool
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bit_identical_to_one_that_never_stopped(
    processes: Any, tmp_path: Path, shard: str, dtype: str
) -> None:
    case = Case(tiny_model(), TrainSection(dtype=dtype, shard=shard, chunk_tokens=16))  # type: ignore[arg-type]
    for went_on, loaded, equal, state in processes.run(3, resumed_on_rank, case, str(tmp_path)):
        assert went_on == loaded
        assert equal
        assert (state.step, state.stream) == (2, STREAM)
    assert newest(open_store(tmp_path)) == (str(tmp_path / "step-00000002"), [])


@pytest.fixture(scope="module")
def of_three(processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """By shard mode: a checkpoint of 3 ranks behind a URL; what it must hold and the losses after it."""
    made = {}
    for shard in SHARDS:
        root = f"file://{tmp_path_factory.mktemp(shard)}/run"
        made[shard] = (f"{root}/step-00000002", processes.run(3, saved_on_rank, of(shard), root)[0])
    return made


@pytest.mark.pool
@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("to", SHARDS)
@pytest.mark.parametrize("shard", SHARDS)
def test_a_checkpoint_of_three_ranks_is_the_same_weights_and_moments_in_any_world(
    processes: Any, of_three: dict[str, tuple[str, Any]], shard: str, to: str, world: int
) -> None:
    address, (tensors, losses) = of_three[shard]
    for found, resumed in processes.run(world, loaded_on_rank, of(to), address):
        assert same(found, tensors)
        np.testing.assert_allclose(resumed, losses, rtol=1e-10)


def read_on_rank(rank: int, world: int, case: Case, address: str) -> int:
    """Bytes that a load asks the storage for."""
    trainer, asked = make_trainer(case, plan_for(world).topology, poison=False), []
    original = ArrowReader._slice_file

    def counted(self: Any, file: Any, sinfo: Any) -> Any:
        asked.append(sinfo.length)
        return original(self, file, sinfo)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrowReader, "_slice_file", counted)
        load(trainer, address)
    return sum(asked)


@pytest.mark.pool
def test_a_rank_reads_only_the_ranges_that_it_needs(processes: Any, of_three: dict[str, tuple[str, Any]]) -> None:
    address = of_three["world"][0]
    total = sum(size for name, size in RunState.read(address).files.items() if name.endswith(".distcp"))
    sharded = processes.run(3, read_on_rank, of("world"), address)
    assert max(sharded) < 0.5 * total  # its third, and the small tensors that every rank has
    assert all(size > 0.9 * total for size in processes.run(3, read_on_rank, of("none"), address))


def held_on_rank(rank: int, world: int, case: Case, root: str) -> tuple[bool, bool, list[float]]:
    """Steps run while a write is held up; what it wrote is the state before them."""
    trainer, store = make_trainer(case, plan_for(world).topology, poison=False), HeldStore(Path(root))
    steps(trainer, case, 1)
    checkpoints = Checkpoints(trainer, store, keep=2)
    before = whole(trainer)
    checkpoints.save(state_at(1))
    losses = steps(trainer, case, 2)
    with torch.no_grad():
        for tensor in tensors_of(trainer).values():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(float("nan"))
    unpublished = checkpoints.trouble is None and newest(store)[0] is None
    store.go.set()
    checkpoints.settle(WAIT)
    load(trainer, newest(store)[0] or "")
    return unpublished, same(whole(trainer), before), losses


@pytest.mark.pool
@pytest.mark.parametrize("shard", SHARDS)
def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    processes: Any, tmp_path: Path, shard: str
) -> None:
    for unpublished, equal, losses in processes.run(3, held_on_rank, of(shard), str(tmp_path)):
        assert unpublished
        assert equal
        assert np.isfinite(losses).all()


def failing_on_rank(rank: int, world: int, case: Case, root: str) -> tuple[str, str, str]:
    """Rank 1 cannot write its file: what `settle`, `trouble` and the next `save` say."""
    trainer = make_trainer(case, plan_for(world).topology, poison=False)
    checkpoints = Checkpoints(trainer, open_store(root), keep=2)

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def error_of(action: Any) -> str:
        try:
            action()
        except RaypackError as error:
            return str(error)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", full_disk)
        checkpoints.save(state_at(1))
        settled = error_of(lambda: checkpoints.settle(WAIT))
        checkpoints.save(state_at(2))
        flight = checkpoints._flight
        assert flight is not None
        assert flight.wait(WAIT)
        trouble, at_save = checkpoints.trouble or "", error_of(lambda: checkpoints.save(state_at(3)))
    checkpoints.save(state_at(4))
    checkpoints.settle(WAIT)
    return settled, trouble, at_save


@pytest.mark.pool
def test_a_rank_that_cannot_write_is_one_error_on_all_ranks_and_no_checkpoint(processes: Any, tmp_path: Path) -> None:
    for texts in processes.run(3, failing_on_rank, Case(tiny_model()), str(tmp_path)):
        assert all(text.count("cannot go on") <= 1 for text in texts)
        assert all("rank 1" in text and "No space left on device" in text and "\n" not in text for text in texts)
        assert [f"the checkpoint of step {step}" in text for step, text in zip((1, 2, 2), texts, strict=True)] == [
            True
        ] * 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000004"]


def late_on_rank(rank: int, world: int, case: Case, root: str) -> tuple[str, int]:
    """Rank 1 gives up waiting before its thread is done; all hear of it, and all can wait again."""
    trainer, store = make_trainer(case, plan_for(world).topology, poison=False), HeldStore(Path(root))
    checkpoints = Checkpoints(trainer, store, keep=2)
    checkpoints.save(state_at(1))
    text = ""
    try:
        threading.Timer(1.0, store.go.set).start()
        checkpoints.settle(0.0 if rank == 1 else WAIT)
    except RaypackError as error:
        text = str(error)
    checkpoints.settle(WAIT)
    checkpoints.save(state_at(2))
    checkpoints.settle(WAIT)
    return text, newest_step(store)


@pytest.mark.pool
def test_a_rank_that_waits_too_short_is_heard_by_all_and_nothing_hangs(processes: Any, tmp_path: Path) -> None:
    for text, step in processes.run(3, late_on_rank, Case(tiny_model()), str(tmp_path)):
        assert "rank 1 cannot go on: the checkpoint of step 1 is not written to" in text
        assert step == 2


def test_every_tensor_is_written_by_one_rank_and_all_write_about_the_same() -> None:
    tensors = {f"t{i}": torch.zeros(40 + i) for i in range(50)} | {"bias": torch.zeros(())}
    shares = [share(tensors, rank, 4) for rank in range(4)]
    assert sorted(name for each in shares for name in each) == sorted(tensors)
    sizes = [sum(t.nbytes for t in each.values()) for each in shares]
    assert max(sizes) - min(sizes) <= max(t.nbytes for t in tensors.values())


def test_the_steps_of_a_checkpoint_are_on_record_before_it_is_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    seen: list[tuple[int, str | None]] = []
    checkpoints = Checkpoints(lone_trainer(), store, 2, lambda step: seen.append((step, newest(store)[0])))
    assert checkpoints.step == -1
    checkpoints.save(state_at(3))
    assert checkpoints.step == 3
    checkpoints.settle(WAIT)
    assert seen == [(3, None)]
    assert newest(store)[0] == store.address_of("step-00000003")


def test_records_that_cannot_be_written_are_the_checkpoints_trouble(tmp_path: Path) -> None:
    def fails(step: int) -> None:
        raise OSError(28, "No space left on device")

    told: list[str] = []
    checkpoints = Checkpoints(lone_trainer(), LocalStore(tmp_path), 2, before_publish=fails, on_failure=told.append)
    checkpoints.save(state_at(3))
    with pytest.raises(RaypackError, match=r"checkpoint of step 3: OSError: .*No space left"):
        checkpoints.settle(WAIT)
    assert list(tmp_path.iterdir()) == []
    checkpoints.settle(WAIT)  # said once
    assert len(told) == 1
    assert "the checkpoint of step 3: OSError: [Errno 28] No space left on device" in told[0]


def test_a_write_that_takes_too_long_is_said_and_can_be_left(tmp_path: Path) -> None:
    store = HeldStore(tmp_path)
    checkpoints = Checkpoints(lone_trainer(), store, 2, timeout=0.1)
    checkpoints.save(state_at(3))
    with pytest.raises(RaypackError, match=r"checkpoint of step 3 is not written to .* after waiting 0\.2 s"):
        checkpoints.settle(0.2)
    with pytest.raises(RaypackError, match=r"step 3 is not written"):
        checkpoints.save(state_at(4))
    checkpoints.close(0.1)
    assert newest(store) == (None, [])
    store.go.set()
    checkpoints.settle(WAIT)
    assert newest(store)[0] == store.address_of("step-00000003")


def test_metadata_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (folder,) = map(Path, written(tmp_path, 1))
    (folder / ".metadata").write_bytes(b"x" * (folder / ".metadata").stat().st_size)
    with pytest.raises(RaypackError, match=r"the checkpoint .*step-00000001"):
        load(lone_trainer(), folder)
