"""What an error of a collective says: this rank failed, or another one is gone or did not come."""

from __future__ import annotations

from raypack.errors import LostRank, RaypackError

# What gloo, NCCL and torch's store say on a rank whose peer went away.
ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "socket closed",
    "broken pipe",
    "remote process exited",
    "ncclremoteerror",
    "read error",
)


# What they say where a rank is there and does not come.
TIMEOUTS = ("timed out", "timeout")


def is_echo(error: BaseException) -> bool:
    """Whether `error` says only that another rank is gone, or did not come."""
    if isinstance(error, RaypackError):
        return isinstance(error, LostRank)
    return _says(error, ECHOES) or is_timeout(error)


def is_timeout(error: BaseException) -> bool:
    """Whether a collective waited as long as it may."""
    return isinstance(error, RuntimeError) and _says(error, TIMEOUTS)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(word in text for word in words)
