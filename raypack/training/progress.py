"""Where a rank is, and what it was asked to do: what its train loop and its controller tell each other.

A Ray Train worker runs the train loop in a thread of its own, while its main thread answers the controller's calls. One
worker process serves one attempt, so there is one `Progress` a process, `here()`; plain processes (tests) make their
own. Reading and writing single attributes needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raypack.observe.reporter import FIRST_PLAN, Pulse

# Phases that are nothing but waiting for the other ranks.
WAITS = ("agree", "gradient_reduce")
# How long the controller waits for the ranks to say where they are.
ANSWER_SECONDS = 3.0


class Whereabouts(NamedTuple):
    """`seconds` = since the rank entered `phase` of `step`; `inside` = the exchange it waits in, "" = in none;
    `over` = its loop has ended, with the run, as it was asked to, or by an error."""

    step: int
    phase: str
    seconds: float
    inside: str
    over: bool

    @property
    def waits(self) -> bool:
        """Whether it is others that keep this rank."""
        return bool(self.inside) or self.phase in WAITS


@dataclass
class Progress:
    """Of one rank. `attempt` = which worker group of the run it belongs to; `asked` = why to leave, "" = go on;
    `inside` tells which exchange the rank waits in; `start` = the phases that are over, with their seconds, until
    the first step's plan is there: from then on the rank is `stepping`."""

    attempt: int = 0
    asked: str = ""
    step: int = -1
    phase: str = "start"
    over: bool = False
    inside: Callable[[], str] = str
    since: float = field(default_factory=time.monotonic)
    step_since: float = 0.0
    start: list[tuple[str, float]] = field(default_factory=list)
    stepping: bool = False

    def enter(self, phase: str, step: int | None = None) -> None:
        """The rank begins `phase`; of `step`, where that is new."""
        now = time.monotonic()
        if not self.stepping:
            self.start.append((self.phase, now - self.since))
            self.stepping = self.phase == FIRST_PLAN
        if step is not None:
            self.step, self.step_since = step, now
        self.phase, self.since = phase, now

    def whereabouts(self) -> Whereabouts:
        return Whereabouts(self.step, self.phase, time.monotonic() - self.since, self.inside(), self.over)

    def pulse(self) -> Pulse:
        seconds = time.monotonic() - (self.step_since if self.stepping else self.since)
        return Pulse(self.attempt, self.step, seconds, self.phase, self.inside(), tuple(self.start), self.over)


_here = Progress()


def here() -> Progress:
    """Of this process."""
    return _here


def begin_attempt(attempt: int) -> None:
    """The controller numbers the worker group, before its train loops start."""
    _here.attempt = attempt


def ask_to_leave(reason: str) -> None:
    """Before the next step all ranks shall save and end."""
    _here.asked = _here.asked or reason


def whereabouts() -> Whereabouts:
    return _here.whereabouts()


def stuck_ranks(where: Mapping[int, Whereabouts | None]) -> str:
    """Who keeps the others waiting, in one clause; "" = nobody in particular.

    Ranks whose process does not answer, else, of those that wait for nobody, the ones that are furthest behind.
    """
    silent = [rank for rank, at in where.items() if at is None]
    if silent:
        return f"rank {_listed(silent)} did not answer within {ANSWER_SECONDS:g} s: it is stuck, or its node is gone"
    busy = {rank: at for rank, at in where.items() if at is not None and not at.waits}
    if not busy or len(busy) == len(where):
        return ""
    step = min(at.step for at in busy.values())
    behind = {rank: at for rank, at in busy.items() if at.step == step}
    at = next(iter(behind.values()))
    return f"rank {_listed(list(behind))} is stuck in {at.phase} of step {step}, for {at.seconds:.0f} s"


def described(where: Mapping[int, Whereabouts | None]) -> dict[int, str]:
    """Each rank's whereabouts for people; None = it did not answer."""
    return {rank: _description(at) for rank, at in where.items()}


def _description(at: Whereabouts | None) -> str:
    if at is None:
        return "no answer"
    inside = f", waiting in {at.inside}" if at.inside else ""
    return f"{at.phase} of step {at.step} for {at.seconds:.1f} s{inside}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
