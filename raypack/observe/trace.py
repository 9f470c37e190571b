"""One Chrome trace of one step over all ranks: open it in Perfetto or chrome://tracing.

Each rank records with torch's profiler; phases, layers and exchanges carry their names. The ranks' clocks are those of
their machines: across machines, rows line up as well as these clocks do. The step that is recorded is slower.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from raypack.plan.topology import Topology

FOLDER = "traces"


def recording(wanted: bool) -> AbstractContextManager[profile | None]:
    """Records what runs inside, where it is wanted; gives the recording, or None."""
    if not wanted:
        return nullcontext()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


def write_trace(
    recorded: profile, run_dir: Path, step: int, rank: int, topology: Topology, group: dist.ProcessGroup | None
) -> None:
    """Every rank calls it; rank 0 writes `traces/step-N.json` of the run directory, from what all of them wrote there.

    A rank that cannot write is missing in the trace and says so on standard error: a trace never ends a run.

    Args:
        group: all ranks; None in a world of one.
    """
    parts = run_dir / FOLDER / f".step-{step}"
    try:
        parts.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(parts / f"rank-{rank}.json"))
    except (OSError, RuntimeError) as error:
        print(f"trace of rank {rank}: {error}", file=sys.stderr, flush=True)
    if group is not None:
        dist.barrier(group)
    if rank == 0:
        try:
            merge_traces(parts, topology, run_dir / FOLDER / f"step-{step}.json")
        except (OSError, ValueError) as error:
            print(f"trace of step {step}: {error}", file=sys.stderr, flush=True)
        shutil.rmtree(parts, ignore_errors=True)


def merge_traces(parts: Path, topology: Topology, target: Path) -> None:
    """One trace of `rank-R.json` files, one process a rank, on one time axis. Whole, or not there at all."""
    files = {rank: parts / f"rank-{rank}.json" for rank in range(topology.world)}
    bases = {rank: _base(path) for rank, path in files.items() if path.is_file()}
    start = min(bases.values(), default=0)
    partial = target.with_name(f".{target.name}")
    with open(partial, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for rank, base in bases.items():
            events = json.loads(files[rank].read_text(encoding="utf-8"))["traceEvents"]
            name = f"rank {rank} (node {topology.node_of[rank]})"
            for event in of_rank(events, rank, topology.world, name, (base - start) / 1e3):
                out.write(separator + json.dumps(event))
                separator = ",\n"
        out.write("\n]}\n")
    partial.replace(target)


def of_rank(events: Iterable[dict[str, Any]], rank: int, world: int, name: str, later: float) -> Iterator[dict]:
    """Events of one rank with process ids, and ids of flows, that no other rank has, `later` microseconds later."""
    processes: dict[Any, int] = {}
    for event in events:
        process = event.get("pid")
        if process not in processes:
            processes[process] = rank + world * len(processes)
            yield _metadata("process_name", processes[process], {"name": name})
            yield _metadata("process_sort_index", processes[process], {"sort_index": processes[process]})
        if event.get("ph") == "M" and event["name"] in ("process_name", "process_sort_index", "process_labels"):
            continue
        moved = {**event, "pid": processes[process]}
        if "ts" in event:
            moved["ts"] = event["ts"] + later
        if "id" in event:
            moved["id"] = f"{rank}.{event['id']}"
        yield moved


def _metadata(name: str, process: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": 0, "args": args}


def _base(path: Path) -> int:
    """Nanoseconds that the file's time stamps are relative to."""
    return int(json.loads(path.read_text(encoding="utf-8")).get("baseTimeNanoseconds", 0))
