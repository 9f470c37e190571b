"""What this machine can carry: cores and memory, also inside a container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use; a container's share is rounded up."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return min(there, -(-int(quota) // int(period)))  # "max" is no integer
    return there


def memory_bytes() -> int:
    """Memory of the machine, or of the container where that has less."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(there, int((CGROUP / "memory.max").read_text()))
    return there
