"""Ranks as processes, for what threads (`tests/threads.py`) cannot show: nothing shared, a writer thread beside the
steps, a hang that must be killed. Forked from one process that has imported torch, once a test session.

`run(world, function, *args)` calls `function(rank, world, *args)` on the first `world` processes, each inside a
fresh process group (`file://` rendezvous, no ports), and returns their results. If a rank raises or the time is up,
all processes are killed (a rank may hang in a collective), the pool starts anew and the rank's traceback is shown.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.machine import scaled

SIZE = 6


def processes() -> Any:
    """Where processes with torch are forked from; it is started once, and has nothing else in it."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos_ranks", "tests.ranks"])
    return context


class RankFailure(AssertionError):
    """A rank raised: `errors` maps ranks to (type name, text)."""

    def __init__(self, text: str, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__(text)
        self.errors = errors


class Pool:
    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="raypack-pool-")
        self._cases = 0
        self._start()

    def _start(self) -> None:
        context = processes()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        self._cases, timeout = self._cases + 1, scaled(timeout)
        store = str(Path(self._folder.name) / f"case-{self._cases}")
        for rank in range(world):
            self._pipes[rank].send((store, world, function, args, timeout))
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str, str]] = {}
        deadline = time.monotonic() + timeout + 10
        while len(results) + len(errors) < world and time.monotonic() < deadline:
            missing = [p for r, p in enumerate(self._pipes[:world]) if r not in results and r not in errors]
            for ready in wait(missing, timeout=1.0):
                rank = self._pipes.index(ready)
                try:
                    ok, value = ready.recv()
                except EOFError:
                    ok, value = False, ("ProcessDied", "the process died", "no traceback: the process died")
                (results if ok else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + 5)  # the others may fail too, or hang
        if errors or len(results) < world:
            hung = sorted(set(range(world)) - set(results) - set(errors))
            self._restart()
            text = "".join(f"\n--- rank {r}\n{trace}" for r, (_, _, trace) in sorted(errors.items()))
            raise RankFailure(f"{text}\nhung ranks: {hung}", {r: e[:2] for r, e in errors.items()})
        return [results[r] for r in range(world)]

    def _restart(self) -> None:
        self._kill()
        self._start()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()

    def close(self) -> None:
        self._kill()
        self._folder.cleanup()


def _serve(rank: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*|.*reduce_scatter_tensor.*")  # FSDP2's own
    while True:
        try:
            store, world, function, args, timeout = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
            value = function(rank, world, *args)
            dist.destroy_process_group()
            pipe.send((True, value))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
            if dist.is_initialized():
                dist.destroy_process_group()
