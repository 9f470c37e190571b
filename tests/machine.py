"""How much slower this machine is now than a quick, quiet one: the limits of tests are multiplied by that.

Machines differ by 2.5x from day to day, and others may be at work on this one. Measured once, when the tests start;
processes that tests start find it in their environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

VARIABLE = "RAYPACK_TEST_TIME_SCALE"
#: what the measurement takes on a quick, quiet machine of two cores
REFERENCE_SECONDS = 0.3
MOST = 6.0


def time_scale() -> float:
    """1 on a quick, quiet machine, up to `MOST` on one that is slow or busy."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{min(MOST, max(1.0, _measure() / REFERENCE_SECONDS)):.2f}"
    return float(os.environ[VARIABLE])


def scaled(seconds: float) -> float:
    """A limit for this machine from one for a quick, quiet machine."""
    return seconds * time_scale()


def _measure() -> float:
    """Seconds until four interpreters that start together have imported numpy."""
    started = time.perf_counter()
    starts = [subprocess.Popen([sys.executable, "-c", "import numpy"]) for _ in range(4)]
    for start in starts:
        start.wait()
    return time.perf_counter() - started
