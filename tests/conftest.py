"""Shared settings: few, seeded hypothesis examples on CI; one thread a process (the machine is shared by ranks)."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background commands with Ctrl-C ignored, and children inherit that: tests that send SIGINT need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback only; must be set before Ray is imported

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.machine import scaled
from tests.pool import Pool

settings.register_profile(
    "quick", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=1000, deadline=None, print_blob=True)
settings.register_profile(  # shrinking a case that hangs or kills ranks costs minutes
    "ranks",
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_configure(config: pytest.Config) -> None:
    """The limit of pyproject.toml is one for a quick, quiet machine; `--timeout` on the command line is meant as it is.

    Conftest hooks come before those of plugins: pytest-timeout reads what is set here.
    """
    if config.option.timeout is None:
        config.option.timeout = scaled(float(config.getini("timeout")))


@pytest.fixture(scope="session")
def pool():
    """Gloo ranks as threads of this process: `pool.run(world, function, *args)`, see `tests/threads.py`."""
    from tests import threads

    return threads


@pytest.fixture(scope="session")
def processes():
    """The same with ranks as processes, up to six, for the whole session: see `tests/pool.py`."""
    started = Pool()
    yield started
    started.close()
