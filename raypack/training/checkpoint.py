"""Checkpoints through torch's distributed checkpoint: complete or not there, readable at any world size.

`<run>/checkpoints/step-00000050/` holds DCP's files (masters, optimizer, router biases) and `state.json` (step, stream
state after it, from its plan; what the weights belong to). A checkpoint is written under a name that nobody reads and
renamed when every rank is done. DCP unpickles its own metadata: load checkpoints only from storage you trust.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from raypack.errors import RaypackError
from raypack.parallel.agreement import agree
from raypack.planning.plan import StreamState
from raypack.training.step import Trainer

FOLDER = "checkpoints"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class RunState:
    """Where a run stands: `step` steps are applied, the stream goes on at `stream`."""

    step: int
    stream: StreamState
    model: str
    corpus: str

    def to_json(self) -> str:
        data = {**asdict(self), "stream": self.stream._asdict(), "version": 1}
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Raises RaypackError where the file is missing or damaged."""
        try:
            data = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            return cls(int(data["step"]), StreamState(**data["stream"]), data["model"], data["corpus"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RaypackError(
                f"{folder} is no complete checkpoint: {error}; give another or --run.resume never"
            ) from None


def save(trainer: Trainer, run_dir: Path, state: RunState, keep: int) -> Path:
    """Every rank calls it after the same step. Returns the checkpoint; older ones beyond `keep` are removed.

    Raises:
        RaypackError: on all ranks, where one could not write.
    """
    group = trainer.groups.host if trainer.groups is not None else None
    final = run_dir / FOLDER / f"step-{state.step:08d}"
    partial = final.with_name(f".partial-{final.name}")
    first = group is None or dist.get_rank(group) == 0
    trouble = None
    if first:
        trouble = _tried(lambda: (shutil.rmtree(partial, ignore_errors=True), partial.mkdir(parents=True)))
    agree(group, bytes(32), "a checkpoint", trouble)
    trouble = _tried(
        lambda: dcp.save(_tensors(trainer), checkpoint_id=partial, process_group=group, no_dist=group is None)
    )
    agree(group, bytes(32), "a checkpoint", trouble)
    if first:
        trouble = _tried(lambda: _publish(partial, final, state, keep))
    agree(group, bytes(32), "a checkpoint", trouble)
    return final


def load(trainer: Trainer, folder: Path) -> RunState:
    """Read a checkpoint of any world size into the trainer. Every rank calls it.

    Raises:
        RaypackError: on all ranks; it is damaged, or belongs to another model.
    """
    group = trainer.groups.host if trainer.groups is not None else None
    state, trouble = None, None
    try:
        state = RunState.read(folder)
    except RaypackError as error:
        trouble = str(error)
    agree(group, bytes(32), "a checkpoint to load", trouble)
    assert state is not None
    tensors = _tensors(trainer)
    trouble = _tried(lambda: dcp.load(tensors, checkpoint_id=folder, process_group=group, no_dist=group is None))
    agree(group, bytes(32), "a checkpoint to load", trouble and f"cannot load {folder}: {trouble}")
    trainer.parameters.publish()  # DCP loaded in place, into the masters themselves
    return state


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run; one that is damaged is passed over."""
    for folder in sorted((run_dir / FOLDER).glob("step-*"), reverse=True):
        with contextlib.suppress(RaypackError):
            RunState.read(folder)
            if (folder / ".metadata").exists():
                return folder
    return None


def _tensors(trainer: Trainer) -> dict[str, Any]:
    """Masters, optimizer moments by parameter name, router biases."""
    model = trainer.parameters.model
    masters = {name: p.detach() for name, p in trainer.parameters.masters.items()}
    buffers = dict(model.named_buffers())
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


def _publish(partial: Path, final: Path, state: RunState, keep: int) -> None:
    (partial / STATE_FILE).write_text(state.to_json(), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in sorted(final.parent.glob("step-*"))[:-keep]:
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def _tried(action: Any) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
