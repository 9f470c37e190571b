"""The last lines of a run: what came of it, what its plans were worth, and how to go on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from raypack.checkpoint.addresses import store_of
from raypack.checkpoint.state import newest
from raypack.checkpoint.storage import is_url
from raypack.config import Config
from raypack.errors import RaypackError
from raypack.files import JOB_MARK
from raypack.observe.run_files import CONFIG_FILE
from raypack.observe.summary import Summary
from raypack.report.console import figure, worth

FINISHED = "finished"
NAME = 13


class Line(NamedTuple):
    """`indent` as `RunView.say` takes it."""

    text: str
    indent: int | None


def last_lines(config: Config, run_dir: Path, summary: Summary | None, page: str, typed: Sequence[str]) -> list[Line]:
    """What a person reads last, whatever ended the run; asks the storage for the newest checkpoint.

    Args:
        config: the run's, as it was given (an empty `data.corpus` = the embedded one).
        summary: of the run, None where the observer could not make it.
        page: where the run's page is, "" = there is none.
        typed: how the job was called, up to its own arguments (`typed_before`).
    """
    lines = [Line(headline(summary), NAME)] if summary is not None else []
    finished = summary is not None and summary.stop_reason == FINISHED
    if summary is not None and (figures := worth(summary)):
        lines.append(_named("modelled", f"{figures} (same samples; cost model of cluster {config.plan.cluster})"))
    checkpoint, trouble = _checkpoint(config, run_dir)
    lines.append(_whole("checkpoint", checkpoint) if checkpoint else _named("checkpoint", trouble))
    if checkpoint:
        lines.append(_whole("go on", command_to_go_on(typed, run_dir, 2 * config.run.steps if finished else 0)))
    if page:
        lines.append(_whole("page", page))
    if summary is None or summary.steps:
        lines.append(_whole("all figures", shlex.join([program("raypack"), "inspect", short(run_dir)])))
    if finished:
        lines.append(_named("next", what_next(config)))
    return lines


def _named(name: str, text: str) -> Line:
    return Line(f"{name:<{NAME}}{text}", NAME)


def _whole(name: str, text: str) -> Line:
    """Of what is copied."""
    return Line(f"{name:<{NAME}}{text}", None)


def _checkpoint(config: Config, run_dir: Path) -> tuple[str, str]:
    """Address of the newest one, else why there is none."""
    try:
        found, _ = newest(store_of(config, run_dir))
    except RaypackError as error:
        return "", str(error)
    if found is not None:
        return found if is_url(found) else short(found), ""
    every = config.train.checkpoint_every
    return "", "none: it is saved " + (f"after every {every} steps and at the end" if every else "at the end only")


def headline(s: Summary) -> str:
    """What came of the run."""
    ended = s.stop_reason.partition(":")[0]
    parts = [f"{s.steps} steps" + (f" on {' then '.join(map(str, s.worlds))} ranks" if s.worlds else "")]
    if s.first_loss is not None:
        parts.append(f"loss {figure(s.first_loss, '{:.4f}')} -> {figure(s.last_loss, '{:.4f}')}")
    if s.heldout_losses:
        parts.append(f"held-out {s.heldout_losses[-1][1]:.4f}")
    if s.tokens_per_second is not None:
        parts.append(f"{s.tokens_per_second:,.0f} tokens/s")
    return f"run {s.run} {ended}: {', '.join(parts)}"


def command_to_go_on(typed: Sequence[str], run_dir: Path, steps: int = 0) -> str:
    """What to type to resume the run in `run_dir` from its newest checkpoint.

    Its `config.toml` has what the arguments said. `steps` = of the whole run then, 0 = as before.
    """
    words = [*typed, "--run", short(run_dir / CONFIG_FILE), "--run.resume", "auto"]
    if JOB_MARK in os.environ:  # what options the submission had is not known here
        words = ["ray", "job", "submit", "--", *words]
    return shlex.join([*words, *(["--run.steps", str(steps)] if steps else [])])


def what_next(config: Config) -> str:
    """What a newcomer may try."""
    own_text = shlex.join([program("raypack"), "data", "build", "--input", "FOLDER", "--out", "CORPUS"])
    data = "" if config.data.corpus else f"your own text: {own_text}, then --data.corpus CORPUS; "
    return f"{data}your own model or cluster: --run FILE.toml; every setting: --help"


def typed_before(argv: Sequence[str]) -> list[str]:
    """The command line of this process up to `argv`, its own arguments, as it was typed."""
    words = sys.orig_argv
    own = len(words) - len(argv)
    if words[own:] != list(argv):
        return [sys.executable, *sys.argv[:1]]
    if Path(words[1]).name == "raypack":  # what was typed, and the shell found its interpreter
        return [program("raypack"), *words[2:own]]
    return words[:own]


def program(name: str) -> str:
    """How to call an installed command of this environment from here."""
    there = Path(sys.executable).with_name(name)
    return short(there) if there.exists() else name


def short(path: str | Path) -> str:
    """Relative to the current directory where it lies below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)
