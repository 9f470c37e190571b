"""Checkpoints through torch's distributed checkpoint: complete or not there, readable at any world size.

Saving copies this rank's share of the tensors to host memory and returns; a thread writes the copy while training goes
on. Its collectives have a process group of their own, `Groups.storage`. Where checkpoints lie and how they become
visible: `storage`; what `state.json` says: `state`. DCP unpickles its own metadata: load checkpoints only
from storage you trust.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from raypack.checkpoint.addresses import locate
from raypack.checkpoint.staging import Stage, Tensors, Trained, share, tensors_of
from raypack.checkpoint.state import RunState
from raypack.checkpoint.storage import Store, folder_name
from raypack.comm.agreement import agree
from raypack.errors import RaypackError

# How long a loop that ends, in an orderly way or not, waits for a write that nobody asks for any more.
CLOSE_SECONDS = 5.0
AGREED = " cannot go on: "


class Checkpoints:
    """Writes a run's checkpoints, one at a time. Every rank constructs it and makes the same calls in the same order.

    Args:
        trainer: whose masters, moments and router biases are saved.
        store: where to.
        keep: complete checkpoints kept; older ones are removed after each save.
        before_publish: called on rank 0, in the writing thread, before the checkpoint of a step becomes visible; what
            it raises is a failed write.
        on_failure: called on rank 0, in the writing thread, with the reason of a failed write.
        timeout: seconds that `save` waits for the write before it.

    Attributes:
        step: of the last checkpoint that was begun; -1 before the first.
    """

    def __init__(
        self,
        trainer: Trained,
        store: Store,
        keep: int,
        before_publish: Callable[[int], None] | None = None,
        on_failure: Callable[[str], None] = lambda reason: None,
        timeout: float = 600.0,
    ) -> None:
        self._trainer, self._store, self._keep = trainer, store, keep
        self._before_publish, self._on_failure, self._timeout = before_publish, on_failure, timeout
        groups = trainer.groups
        self._host = groups.host if groups is not None else None
        self._group = groups.storage if groups is not None else None
        self._stage = Stage(self._group)
        self._flight: _Flight | None = None
        self.step = -1

    def save(self, state: RunState) -> None:
        """Every rank calls it after the same step. Returns when the tensors may change again; the write goes on.

        Raises:
            RaypackError: on all ranks, where one failed with the write before, or has no memory for the copy.
        """
        trouble = self._awaited(self._timeout)
        staged: Tensors = {}
        if trouble is None:
            what = f"the copy for the checkpoint of step {state.step}"
            trouble = _tried(what, lambda: staged.update(self._copied()))
        agree(self._host, bytes(32), f"the checkpoint of step {state.step}", trouble)
        self._flight, self.step = _Flight(state.step, lambda: self._write(staged, state)), state.step

    def settle(self, timeout: float) -> None:
        """Wait until the write in flight is complete and visible. Every rank calls it.

        Raises:
            RaypackError: on all ranks, where one could not write, or is not done after `timeout` seconds.
        """
        if self._flight is None:
            return
        agree(self._host, bytes(32), f"the checkpoint of step {self._flight.step}", self._awaited(timeout))
        self._flight = None  # after the agreement: on all ranks or on none

    @property
    def trouble(self) -> str | None:
        """Why the last write failed, where it has and no error has said so yet; asked without waiting."""
        flight = self._flight
        return flight.trouble if flight is not None and flight.done and not flight.said else None

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Wait a little for the write in flight, then leave it; raises nothing. Unpublished, it stays invisible."""
        if self._flight is not None:
            self._flight.wait(timeout)

    def _awaited(self, timeout: float) -> str | None:
        """This rank's trouble with the write in flight, told once."""
        flight = self._flight
        if flight is None or flight.said:
            return None
        if not flight.wait(timeout):
            return (
                f"the checkpoint of step {flight.step} is not written to {self._store.address} after waiting "
                f"{timeout:g} s ({flight.seconds:.0f} s in all): give it faster storage or a longer timeout"
            )
        flight.said = flight.trouble is not None
        return flight.trouble

    def _copied(self) -> Tensors:
        group = self._group
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        return self._stage.copy(share(tensors_of(self._trainer), rank, world))

    def _write(self, staged: Tensors, state: RunState) -> None:
        """Runs in the thread. Raises RaypackError on all ranks, where one could not write."""
        group, store, name = self._group, self._store, folder_name(state.step)
        first, what = group is None or dist.get_rank(group) == 0, f"the checkpoint of step {state.step}"
        try:
            agree(group, bytes(32), what, _tried(what, lambda: store.prepare(name)) if first else None)
            written = _tried(
                what,
                lambda: dcp.save(staged, storage_writer=store.writer(name), process_group=group, no_dist=group is None),
            )
            agree(group, bytes(32), what, written)
            agree(group, bytes(32), what, _tried(what, lambda: self._publish(name, state)) if first else None)
        except BaseException as error:
            if first:
                with suppress(Exception):
                    store.discard(name)
                with suppress(Exception):
                    self._on_failure(str(error))
            raise

    def _publish(self, name: str, state: RunState) -> None:
        if self._before_publish is not None:
            self._before_publish(state.step)
        self._store.publish(name, state.with_files(self._store.written(name)).to_json())
        self._store.prune(self._keep, spare=name)


class _Flight:
    """One write, in a thread that ends with the process."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        self.step = step
        self.trouble: str | None = None
        self.said = False
        self._write, self._started = write, time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        text = _tried(f"the checkpoint of step {self.step}", self._write)
        # The ranks have agreed on it; the loop's next agreement says again which they are.
        self.trouble = text and text.rpartition(AGREED)[2]

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def wait(self, timeout: float) -> bool:
        """Whether it is done after at most `timeout` seconds."""
        self._thread.join(timeout)
        return self.done


def load(trainer: Trained, address: str | os.PathLike[str]) -> RunState:
    """Read the checkpoint at a path or URL, of any world size, into the trainer. Every rank calls it.

    Raises:
        RaypackError: on all ranks; it is damaged, or belongs to another model.
    """
    group = trainer.groups.host if trainer.groups is not None else None
    states: list[RunState] = []
    what = f"the checkpoint {os.fspath(address)}"
    trouble = _tried(what, lambda: states.append(RunState.read(address)))
    agree(group, bytes(32), what, trouble)
    store, name = locate(address)
    tensors = tensors_of(trainer)
    trouble = _tried(
        what, lambda: dcp.load(tensors, storage_reader=store.reader(name), process_group=group, no_dist=group is None)
    )
    agree(group, bytes(32), what, trouble)
    trainer.parameters.publish()  # DCP loaded in place, into the masters themselves
    return states[0]


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
