"""`state.json`: what a checkpoint belongs to, what differs from this run, which one is the newest that is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from raypack.checkpoint.addresses import open_store
from raypack.checkpoint.checkpoints import load
from raypack.checkpoint.staging import tensors_of
from raypack.checkpoint.state import RunState, check_same, model_digest, newest
from raypack.config import Config
from raypack.errors import RaypackError
from tests.checkpoint_cases import STREAM, lone_trainer, same, state_at, whole, written
from tests.ranks import tiny_model

# A world of one saves without a process group, which is what it wants.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _truncate(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)


def _change_state(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**data, **changes}))

    return change


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_truncate, "bytes, not"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), "distcp is missing"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: os.truncate(folder / "state.json", 40), "JSONDecodeError"),
        (lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe{}"), "UnicodeDecodeError"),
        (lambda folder: (folder / "state.json").write_text("[]"), "TypeError"),
        (_change_state(stream={"seed": 0}), "TypeError"),
        (_change_state(version=3), "version 3, this raypack reads 1, 2"),
        (_change_state(step="soon"), "ValueError"),
        (_change_state(config=[1]), "AttributeError"),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_and_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], why: str, scheme: str
) -> None:
    older, damaged = written(f"{scheme}{tmp_path}", 1, 2)
    damage(tmp_path / "step-00000002")
    found, notes = newest(open_store(f"{scheme}{tmp_path}"))
    assert found == older
    assert len(notes) == 1
    assert notes[0].startswith(f"passed over {damaged}, which is damaged or was never finished: ")
    assert why in notes[0]
    with pytest.raises(RaypackError, match=r"step-00000002 is no complete checkpoint"):
        load(lone_trainer(), damaged)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RaypackError, match=r"is no complete checkpoint \(state\.json is missing\)"):
        RunState.read(tmp_path / "nothing")


def test_a_state_is_the_same_after_writing_and_reading() -> None:
    state = RunState.of(Config(), "print", 7, STREAM).with_files({"a": 1})
    again = RunState.from_json(state.to_json())
    assert again == state
    assert set(again.config) == {"model", "data", "train", "run"}


def test_a_file_of_version_1_still_loads(tmp_path: Path) -> None:
    """As written before version 2: no config, and tensors under nested names."""
    trainer, folder = lone_trainer(), tmp_path / "step-00000004"
    nested: dict[str, dict[str, Any]] = {"masters": {}, "buffers": {}, "optimizer": {}}
    for name, tensor in tensors_of(trainer).items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition(".")
            nested[kind].setdefault(parameter, {})[key] = tensor
        else:
            nested[kind][rest] = tensor
    dcp.save(nested, checkpoint_id=folder, no_dist=True)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    data = {"version": 1, "step": 4, "stream": STREAM._asdict(), "model": "m", "corpus": "c", "files": sizes}
    (folder / "state.json").write_text(json.dumps(data))
    other = lone_trainer(seed=1)
    assert not same(whole(other), whole(trainer))
    assert load(other, folder) == RunState(4, STREAM, "m", "c", {}, sizes)
    assert same(whole(other), whole(trainer))


def _changed(**sections: dict[str, Any]) -> Config:
    plain = Config().model_dump()
    return Config.model_validate({name: {**plain[name], **sections.get(name, {})} for name in plain})


def test_what_changes_the_model_or_the_stream_is_listed() -> None:
    state = RunState.of(Config(), "print", 50, STREAM)
    other = _changed(model={"layers": 12, "qk_norm": True}, data={"seed": 1, "long_documents": "skip"})
    with pytest.raises(RaypackError) as error:
        check_same("runs/a/step-00000050", state, other, "another")
    assert str(error.value) == (
        "runs/a/step-00000050 was trained with model.layers = 8, this run has 12; model.qk_norm = false, this run has "
        "true; data.long_documents = 'truncate', this run has 'skip'; data.seed = 0, this run has 1; data.corpus of "
        "fingerprint print, this run has another: use the config.toml of its run, or --run.resume never"
    )


def test_what_changes_neither_may_change() -> None:
    state = RunState.of(Config(), "print", 50, STREAM)
    other = _changed(
        model={"name": "b", "preset": "c"},
        data={"corpus": "/elsewhere", "holdout_tokens": 0},
        train={"lr": 1e-4, "shard": "world"},
        run={"steps": 900, "seed": 4},
        topology={"workers": 3},
    )
    check_same("a", state, other, "print")
    with pytest.raises(RaypackError, match=r"was trained on another corpus \(data\.corpus of fingerprint print, this"):
        check_same("a", state, other, "another")


def test_a_setting_that_the_file_lacks_counts_as_its_default_and_one_unknown_here_is_named() -> None:
    state = RunState.of(Config(), "print", 50, STREAM)
    saved = {name: dict(section) for name, section in state.config.items()}
    del saved["model"]["linear_conv"]
    older = RunState.from_json(json.dumps({**json.loads(state.to_json()), "config": saved}))
    check_same("a", older, Config(), "print")
    with pytest.raises(RaypackError, match=r"model\.linear_conv = 0, this run has 4"):
        check_same("a", older, _changed(model={"linear_conv": 4}), "print")
    saved["model"]["wings"] = 2
    newer = RunState.from_json(json.dumps({**json.loads(state.to_json()), "config": saved}))
    with pytest.raises(RaypackError, match=r"model\.wings = 2, which this raypack does not know"):
        check_same("a", newer, Config(), "print")


def test_without_its_config_a_file_is_compared_by_its_digest() -> None:
    config = Config()
    check_same("a", state_at(1, model=model_digest(config.model), corpus="c"), config, "c")
    with pytest.raises(RaypackError, match="holds another model"):
        check_same("a", state_at(1, corpus="c"), config, "c")


def test_a_models_name_is_no_part_of_what_its_weights_belong_to() -> None:
    model = tiny_model(name="a")
    assert model_digest(model) == model_digest(tiny_model(name="b", preset="c"))
    assert model_digest(model) != model_digest(tiny_model(window=6))
