"""Ranks as threads of the test's own process: real gloo groups, nothing spawned, so a case costs milliseconds.

`run(world, function, *args)` calls `function(rank, world, *args)` on `world` threads, each inside the process group of
its own, as `tests/pool.py` does on processes: what runs on one runs on the other. Arguments are shared, not copied, and
so is what a rank patches: patch in the test, before. Processes are for many cores, long cases, a hang that must be
killed.

torch keeps its groups in one object of the process; in its own tests of FSDP one that differs from thread to thread
takes its place, and here too.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as torch_threads

from tests.machine import scaled
from tests.pool import RankFailure


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Results by rank.

    Raises:
        RankFailure: a rank raised, or did not end in `timeout` seconds.
    """
    store, results, errors = dist.HashStore(), {}, {}
    timeout = scaled(timeout)

    def serve(rank: int) -> None:
        limit = timedelta(seconds=timeout)
        try:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
            results[rank] = function(rank, world, *args)
        except Exception as error:
            errors[rank] = (type(error).__name__, str(error), traceback.format_exc())
        finally:
            if rank in errors:
                gc.collect()  # what its frames held: a group that is gone fails the ranks that wait in it
            if dist.is_initialized():
                dist.destroy_process_group()

    torch_threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with warnings.catch_warnings():
            # FSDP2's own
            warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*|.*reduce_scatter_tensor.*")
            ranks = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(world)]
            for each in ranks:
                each.start()
            deadline = time.monotonic() + timeout + 5
            for each in ranks:
                each.join(max(0.0, deadline - time.monotonic()))
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        torch_threads._uninstall_threaded_pg()
    if len(results) < world:
        text = "".join(f"\n--- rank {r}\n{trace}" for r, (_, _, trace) in sorted(errors.items()))
        hung = sorted(set(range(world)) - set(results) - set(errors))
        raise RankFailure(f"{text}\nhung ranks: {hung}", {r: e[:2] for r, e in errors.items()})
    return [results[rank] for rank in range(world)]


def calls_by_rank(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    """Filled from now on: the rank of every call of `module.name`."""
    calls, original = [], getattr(module, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(dist.get_rank())
        return original(*args, **options)

    patch.setattr(module, name, counted)
    return calls
