"""Checkpoints through torch's distributed checkpoint: complete or not there, readable at any world size.

`<run>/checkpoints/step-00000050/` holds DCP's files (masters, optimizer, router biases) and `state.json`: step, stream
state after it (from its plan), what the weights belong to, and every file with its size, so that one that lost its end
is noticed. A checkpoint is written under a name that nobody reads, renamed when every rank is done, and renamed again
before it is removed: a process killed at any moment leaves nothing half that opens. DCP unpickles its own metadata:
load checkpoints only from storage you trust.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from raypack.config import ModelConfig
from raypack.errors import RaypackError
from raypack.parallel.agreement import agree, digest_of
from raypack.planning.plan import StreamState
from raypack.training.step import Trainer

FOLDER, STATE_FILE, STATE_VERSION = "checkpoints", "state.json", 1
PARTIAL, OLD = ".partial-", ".old-"


def model_digest(model: ModelConfig) -> str:
    """What a checkpoint's weights belong to: every field but those that only name the model."""
    return digest_of(model.model_dump_json(exclude={"name", "preset"})).hex()


@dataclass(frozen=True)
class RunState:
    """Where a run stands: `step` steps are applied, the stream goes on at `stream`. `files` = bytes by name."""

    step: int
    stream: StreamState
    model: str
    corpus: str
    files: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        data = {
            "version": STATE_VERSION,
            "step": self.step,
            "stream": self.stream._asdict(),
            "model": self.model,
            "corpus": self.corpus,
            "files": self.files,
        }
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Raises RaypackError where `folder` is no checkpoint, or a file of it is missing or has lost its end."""
        try:
            data = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            if data["version"] != STATE_VERSION:
                raise ValueError(f"version {data['version']!r}, this raypack reads {STATE_VERSION}")
            files = {str(name): int(size) for name, size in data["files"].items()}
            state = cls(
                int(data["step"]), StreamState(**data["stream"]), str(data["model"]), str(data["corpus"]), files
            )
            for name, size in files.items():
                if (folder / name).stat().st_size != size:
                    raise ValueError(f"{name} has {(folder / name).stat().st_size} bytes, not {size}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RaypackError(
                f"{folder} is no complete checkpoint ({type(error).__name__}: {error}): give another one, or "
                "--run.resume never"
            ) from None
        return state


def save(trainer: Trainer, run_dir: Path, state: RunState, keep: int) -> Path:
    """Every rank calls it after the same step. Returns the checkpoint; older ones beyond `keep` are removed.

    Raises:
        RaypackError: on all ranks, where one could not write.
    """
    group = trainer.groups.host if trainer.groups is not None else None
    final = run_dir / FOLDER / f"step-{state.step:08d}"
    partial = final.with_name(PARTIAL + final.name)
    what = f"the checkpoint of step {state.step}"
    first = group is None or dist.get_rank(group) == 0
    trouble = _tried(what, lambda: _clear(partial)) if first else None
    agree(group, bytes(32), what, trouble)
    trouble = _tried(
        what, lambda: dcp.save(_tensors(trainer), checkpoint_id=partial, process_group=group, no_dist=group is None)
    )
    agree(group, bytes(32), what, trouble)
    trouble = _tried(what, lambda: _publish(partial, final, state, keep)) if first else None
    agree(group, bytes(32), what, trouble)
    return final


def load(trainer: Trainer, folder: Path) -> RunState:
    """Read a checkpoint of any world size into the trainer. Every rank calls it.

    Raises:
        RaypackError: on all ranks; it is damaged, or belongs to another model.
    """
    group = trainer.groups.host if trainer.groups is not None else None
    states: list[RunState] = []
    what = f"the checkpoint {folder}"
    trouble = _tried(what, lambda: states.append(RunState.read(folder)))
    agree(group, bytes(32), what, trouble)
    tensors = _tensors(trainer)
    trouble = _tried(what, lambda: dcp.load(tensors, checkpoint_id=folder, process_group=group, no_dist=group is None))
    agree(group, bytes(32), what, trouble)
    trainer.parameters.publish()  # DCP loaded in place, into the masters themselves
    return states[0]


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run; one that is damaged is passed over."""
    for folder in sorted((run_dir / FOLDER).glob("step-*"), reverse=True):
        with suppress(RaypackError):
            RunState.read(folder)
            return folder
    return None


def _tensors(trainer: Trainer) -> dict[str, Any]:
    """Masters, optimizer moments by parameter name, router biases."""
    masters = {name: p.detach() for name, p in trainer.parameters.masters.items()}
    buffers = dict(trainer.parameters.model.named_buffers())
    return {"masters": masters, "buffers": buffers, "optimizer": _moments(trainer)}


def _moments(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    """AdamW's state by parameter name; made (as zeros) where no step has been taken yet."""
    names = {id(p): name for name, p in trainer.parameters.masters.items()}
    out: dict[str, dict[str, torch.Tensor]] = {}
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:
            state = trainer.optimizer.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
            out[names[id(p)]] = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return out


def _clear(partial: Path) -> None:
    """An empty directory for this checkpoint, and no leftovers of a process that was killed."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (*partial.parent.glob(PARTIAL + "*"), *partial.parent.glob(OLD + "*")):
        shutil.rmtree(leftover)
    partial.mkdir()


def _publish(partial: Path, final: Path, state: RunState, keep: int) -> None:
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    complete = RunState(state.step, state.stream, state.model, state.corpus, files)
    with open(partial / STATE_FILE, "w", encoding="utf-8") as file:
        file.write(complete.to_json())
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        _remove(final)
    os.replace(partial, final)
    for old in sorted(final.parent.glob("step-*"))[:-keep]:
        if old != final:
            _remove(old)


def _remove(folder: Path) -> None:
    gone = folder.with_name(OLD + folder.name)
    os.replace(folder, gone)
    shutil.rmtree(gone)


def _tried(what: str, action: Callable[[], Any]) -> str | None:
    """The text of what went wrong; None where nothing did."""
    try:
        action()
    except RaypackError as error:
        return str(error)
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"{what}: rank {rank}: {_named(cause)}"
    except Exception as error:
        return f"{what}: {_named(error)}"
    return None


def _named(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:500]
