"""Why a run failed, in one line: the cause, not its echoes on the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError

from raypack.comm.faults import is_echo
from raypack.errors import LostRank, RaypackError

LINE_MAX = 500


def refusal_in(failures: Mapping[int, Exception]) -> RaypackError | None:
    """What raypack itself refused on a rank, if it did: the same would happen again."""
    for error in failures.values():
        for cause in causes_of(error):
            if isinstance(cause, RaypackError) and not isinstance(cause, LostRank):
                return cause
    return None


def is_death(error: BaseException) -> bool:
    """Whether the rank's process is gone."""
    return any(isinstance(cause, RayActorError) for cause in causes_of(error))


def reason_of(error: BaseException) -> str:
    """One line: what all ranks agreed on, else the first cause among the ranks' own errors, with the rank."""
    if isinstance(error, WorkerGroupError):
        return _of_ranks(dict(sorted(error.worker_failures.items())))
    if isinstance(error, ControllerError):
        return reason_of(error.controller_failure)
    if isinstance(error, RaypackError):
        return str(error)
    return _line(error)


def _of_ranks(failures: dict[int, Exception]) -> str:
    if refusal := refusal_in(failures):
        return str(refusal)
    if not failures:
        return "a worker failed without a word"
    causes = {rank: error for rank, error in failures.items() if not is_echo(error)} or failures
    rank, error = next(iter(causes.items()))
    if is_death(error):
        return f"rank {rank}: its process died (killed, or out of memory)"
    if isinstance(error, LostRank):
        return str(error)
    if is_echo(error):
        return f"rank {rank} lost another rank: {_line(error)}"
    return f"rank {rank}: {_line(error)}"


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and what Ray and Python wrapped in it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        inner = getattr(seen, "health_check_failure", None) or getattr(seen, "cause", None) or seen.__cause__
        seen = inner if isinstance(inner, BaseException) else None


def _line(error: BaseException) -> str:
    """Type and text; of a text with a traceback its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[-1] if any(line.startswith("Traceback") for line in lines) else " ".join(lines)
    named = text if text.startswith(type(error).__name__) else f"{type(error).__name__}: {text}"
    return named if len(named) <= LINE_MAX else named[:LINE_MAX] + " ..."
