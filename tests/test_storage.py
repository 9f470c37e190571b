"""Stores: a directory, and an object store behind file:// and S3 URLs. What a kill leaves never opens."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from raypack.checkpoint import storage
from raypack.checkpoint.addresses import locate, open_store, store_of
from raypack.checkpoint.checkpoints import Checkpoints, load
from raypack.checkpoint.objects import ObjectStore
from raypack.checkpoint.state import RunState, newest, newest_step
from raypack.checkpoint.storage import LocalStore, Store
from raypack.config import Config, RunSection, TrainSection, build
from raypack.driver.nodes import check_storage
from raypack.driver.rundir import resolve_run
from raypack.errors import RaypackError
from tests.checkpoint_cases import loaded_on_rank, lone_trainer, names, of, same, saved_on_rank, written
from tests.ranks import Case

# A world of one saves without a process group, which is what it wants.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SERVER = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture(params=["directory", "url"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "deep" / "run"
    return str(folder) if request.param == "directory" else f"file://{folder}"


def test_older_checkpoints_go_and_the_newest_ones_stay(address: str) -> None:
    written(address, 8, 9, 10, keep=2)
    assert names(open_store(address)) == ["step-00000009", "step-00000010"]
    assert newest_step(open_store(address)) == 10


def test_a_checkpoint_that_is_written_again_takes_the_place_of_the_first(address: str) -> None:
    before = RunState.read(written(address, 3)[0])
    (again,) = written(address, 3)
    assert RunState.read(again).files.keys() >= {".metadata"}
    assert sum(len(open_store(address).sizes(name)) for name in names(open_store(address))) == len(before.files) + 1


def test_an_old_one_that_cannot_be_removed_costs_nothing_of_the_new_one(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(address, 1)

    def fails(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Store, "prune", fails)
    with pytest.raises(RaypackError, match=r"the checkpoint of step 2: PermissionError"):
        written(address, 2)
    assert newest_step(open_store(address)) == 2


def test_steps_beyond_eight_digits_are_ordered_by_number(address: str) -> None:
    written(address, 99_999_999, 100_000_000)
    assert newest_step(open_store(address)) == 100_000_000


def test_a_store_that_is_not_there_yet_is_empty(address: str) -> None:
    assert newest(open_store(address)) == (None, [])
    assert newest_step(open_store(address)) == -1


def test_an_address_opens_the_same_checkpoint(address: str) -> None:
    (found,) = written(address, 2)
    store, name = locate(found)
    assert (store.address, name) == (address, "step-00000002")
    assert load(lone_trainer(seed=1), found).step == 2


def test_the_query_of_a_url_stays_behind_its_path() -> None:
    store, name = locate("s3://bucket/runs/a/step-00000050?region=eu-west-1")
    assert (store.address, name) == ("s3://bucket/runs/a?region=eu-west-1", "step-00000050")
    assert store.address_of(name) == "s3://bucket/runs/a/step-00000050?region=eu-west-1"
    config = Config(train=TrainSection(checkpoint_root="s3://bucket/runs/?region=eu-west-1"))
    assert store_of(config, Path("/anywhere/a")).address == "s3://bucket/runs/a?region=eu-west-1"


def test_the_root_of_the_run_file_holds_a_folder_of_the_run(tmp_path: Path) -> None:
    assert store_of(Config(), tmp_path / "r").address == str(tmp_path / "r" / "checkpoints")
    given = Config(train=TrainSection(checkpoint_root=str(tmp_path / "elsewhere")))
    assert store_of(given, tmp_path / "r").address == str(tmp_path / "elsewhere" / "r")
    with pytest.raises(RaypackError, match=r"must be an absolute directory or a URL"):
        build(TrainSection, {"checkpoint_root": "elsewhere"}, "train")


@pytest.mark.parametrize("url", ["moon://a/b", "s3://", "s3://bucket?color=green"])
def test_a_url_that_is_no_storage_is_one_line(url: str) -> None:
    with pytest.raises(RaypackError, match=r"give a directory or a URL|names no place") as error:
        open_store(url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_storage_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "file").touch()
    config = Config(train=TrainSection(checkpoint_root=f"{prefix}{tmp_path}/file/x"))
    with pytest.raises(RaypackError, match=r"cannot write checkpoints to .*file/x/run: .*train\.checkpoint_root"):
        check_storage(config, tmp_path / "run", 5)
    good = Config(train=TrainSection(checkpoint_root=f"{prefix}{tmp_path}/good"))
    check_storage(good, tmp_path / "run", 5)
    assert list((tmp_path / "good").rglob("*")) == [tmp_path / "good" / "run"]


def test_auto_resumes_from_the_runs_place_in_the_storage(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/store"
    config = Config(
        run=RunSection(root=str(tmp_path / "runs"), name="r", resume="auto"), train=TrainSection(checkpoint_root=root)
    )
    assert resolve_run(config) == (tmp_path / "runs" / "r", None)
    (found,) = written(f"{root}/r", 4)
    assert resolve_run(config) == (tmp_path / "runs" / "r", found)
    named = config.model_copy(update={"run": RunSection(root=str(tmp_path), name="other", resume=found)})
    assert resolve_run(named) == (tmp_path / "other", found)


def _dies(address: str, point: str) -> None:
    """Save step 2 over an older step 1 with keep = 1, and die at `point`, like a process that is killed."""
    moves = {"before the rename": 0, "between new and old": 1}

    def die(*_: Any, **__: Any) -> None:
        os._exit(9)

    if point in moves:
        done: list[Any] = []

        def replace_until(*names: Any) -> None:
            if len(done) == moves[point]:
                die()
            done.append(names)
            os.rename(*names)

        storage.os.replace = replace_until  # type: ignore[attr-defined, assignment]
    elif point == "while writing":
        dcp.FileSystemWriter.finish = die  # type: ignore[method-assign]
    elif point == "before publishing":
        Checkpoints._publish = die  # type: ignore[method-assign]
    elif point == "while the old one goes":

        def half(gone: Path) -> None:
            next(Path(gone).iterdir()).unlink()
            die()

        storage.shutil.rmtree = half  # type: ignore[attr-defined, assignment]
    elif point == "while the state is written":

        def torn(self: ObjectStore, name: str, state: str) -> None:
            with self.fs.open_output_stream(self._at(name, "state.json")) as file:
                file.write(state[:40].encode())
            die()

        ObjectStore.publish = torn  # type: ignore[method-assign]
    elif point == "while the old objects go":

        def without_state(self: ObjectStore, name: str) -> None:
            self.fs.delete_file(self._at(name, "state.json"))
            die()

        ObjectStore.remove = without_state  # type: ignore[method-assign]
    written(address, 2, keep=1)
    os._exit(1)


@pytest.mark.parametrize(
    ("scheme", "point", "left"),
    [
        ("", "while writing", 1),
        ("", "before publishing", 1),
        ("", "before the rename", 1),
        ("", "between new and old", 2),
        ("", "while the old one goes", 2),
        ("file://", "while writing", 1),
        ("file://", "before publishing", 1),
        ("file://", "while the state is written", 1),
        ("file://", "while the old objects go", 2),
    ],
)
def test_a_kill_at_any_moment_leaves_nothing_half_that_opens(
    tmp_path: Path, scheme: str, point: str, left: int
) -> None:
    address = f"{scheme}{tmp_path}/run"
    written(address, 1)
    process = multiprocessing.get_context("fork").Process(target=_dies, args=(address, point))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    found, _ = newest(open_store(address))
    assert found is not None
    assert load(lone_trainer(seed=1), found).step == left
    written(address, 3, keep=1)  # what was left behind is in nobody's way, and goes
    assert names(open_store(address)) == ["step-00000003"]


def test_files_of_a_writer_that_was_thought_dead_get_into_no_other_checkpoint(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/run"
    store = open_store(address)
    store.prepare("step-00000001")
    late = store.writer("step-00000001")
    written(address, 1)
    state = RunState.read(f"{address}/step-00000001")
    dcp.save({"masters.x": torch.ones(3)}, storage_writer=_only_data(late), no_dist=True)
    assert RunState.read(f"{address}/step-00000001") == state
    load(lone_trainer(seed=1), f"{address}/step-00000001")


def _only_data(writer: Any) -> Any:
    """A rank other than the first: it writes its file and never the metadata."""
    writer.finish = lambda **_: None
    writer._metadata_exists = lambda: False
    return writer


class Down(ObjectStore):
    """A server that does not answer."""

    def read(self, name: str) -> str:
        raise OSError("AWS Error NETWORK_CONNECTION during GetObject: curlCode: 28,\nTimeout was reached")


def test_a_server_that_is_down_is_no_older_checkpoint(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/run"
    written(address, 1, 2)
    with pytest.raises(RaypackError, match=r"cannot read .*step-00000002: .*Timeout was reached; is its storage there"):
        newest(Down(address))
    assert newest_step(Down(address)) == -1


@pytest.fixture(scope="module")
def bucket() -> Iterator[Callable[[str], str]]:
    """From a prefix to an S3 URL on a server of this process."""
    server_of = pytest.importorskip("moto.server", reason="needs moto[server]")
    boto3 = pytest.importorskip("boto3")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SERVER.items():
            patch.setenv(name, value)
        host, port = server.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="raypack")
        yield lambda path: f"s3://{path}?region=us-east-1&scheme=http&endpoint_override={host}:{port}"
        server.stop()


def test_s3_keeps_the_newest_and_passes_over_what_was_never_finished(bucket: Callable[[str], str]) -> None:
    address = bucket("raypack/runs/a")
    first, second = written(address, 1, 2)
    store = open_store(address)
    assert newest(store) == (second, [])
    assert load(lone_trainer(seed=1), second).step == 2
    assert isinstance(store, ObjectStore)
    store.fs.delete_file(store._at("step-00000002", "state.json"))
    found, notes = newest(store)
    assert found == first
    assert len(notes) == 1
    assert "step-00000002" in notes[0]
    assert "state.json is missing" in notes[0]
    written(address, 3, keep=1)
    assert [name for name in names(store) if store.sizes(name)] == ["step-00000003"]


def on_s3(rank: int, world: int, function: Callable[..., Any], case: Case, address: str) -> Any:
    """A rank of the pool, with what the server of the other process asks for."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SERVER.items():
            patch.setenv(name, value)
        return function(rank, world, case, address)


@pytest.mark.pool
@pytest.mark.rest
def test_ranks_write_to_s3_together_and_another_world_reads_it(bucket: Callable[[str], str], processes: Any) -> None:
    case, root = of("world"), bucket("raypack/runs/ranks")
    tensors, losses = processes.run(3, on_s3, saved_on_rank, case, root)[0]
    address, notes = newest(open_store(root))
    assert (newest_step(open_store(root)), notes) == (2, [])
    for found, resumed in processes.run(2, on_s3, loaded_on_rank, case, address):
        assert same(found, tensors)
        np.testing.assert_allclose(resumed, losses, rtol=1e-10)


def test_s3_is_probed_and_a_bucket_that_is_not_there_is_one_line(bucket: Callable[[str], str], tmp_path: Path) -> None:
    good = Config(train=TrainSection(checkpoint_root=bucket("raypack/probed")))
    check_storage(good, tmp_path / "r", 5)
    assert open_store(bucket("raypack/probed/r")).listed() == []
    bad = Config(train=TrainSection(checkpoint_root=bucket("nowhere/x")))
    with pytest.raises(RaypackError, match=r"cannot write checkpoints to s3://nowhere/x/r.*train\.checkpoint_root"):
        check_storage(bad, tmp_path / "r", 5)


def test_local_names_of_other_things_are_no_checkpoints(tmp_path: Path) -> None:
    written(tmp_path, 4)
    for other in (".partial-step-00000009", "step-latest", "notes"):
        (tmp_path / other).mkdir()
    assert LocalStore(tmp_path).names() == ["step-00000004"]
