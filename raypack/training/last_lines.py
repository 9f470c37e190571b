"""The last lines of a run: what came of it, what its plans were worth, and how to go on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from raypack.config import Config
from raypack.errors import RaypackError
from raypack.observe.console import figure, megabytes, times
from raypack.observe.record import Bytes, by_scope
from raypack.observe.summary import Summary
from raypack.training.checkpoint_state import newest
from raypack.training.rundir import CONFIG_FILE, JOB_MARK
from raypack.training.storage import Store, is_url

FINISHED = "finished"


def last_lines(
    config: Config, run_dir: Path, summary: Summary | None, page: Path | None, typed: Sequence[str]
) -> list[str]:
    """What a person reads last, whatever ended the run; asks the storage for the newest checkpoint.

    Args:
        config: the run's, as it was given (an empty `data.corpus` = the embedded one).
        summary: of the run, None where the observer could not make it.
        page: of the run, where it was written.
        typed: how the job was called, up to its own arguments (`typed_before`).
    """
    lines = [headline(summary)] if summary is not None else []
    finished = summary is not None and summary.stop_reason == FINISHED
    said = {"modelled": worth(summary, config.plan.cluster) if summary is not None else ""}
    try:
        checkpoint, _ = newest(Store.of(config, run_dir))
    except RaypackError as error:
        said["checkpoint"] = str(error)
    else:
        if checkpoint is not None:
            said["checkpoint"] = checkpoint if is_url(checkpoint) else short(checkpoint)
            said["go on"] = command_to_go_on(typed, run_dir, 2 * config.run.steps if finished else 0)
        else:
            said["checkpoint"] = f"none yet: the first is saved after {config.train.checkpoint_every} steps"
            if not config.train.checkpoint_every:
                said["checkpoint"] = "none: train.checkpoint_every = 0 saves one at the end only"
    said["page"] = short(page) if page is not None else ""
    said["all figures"] = shlex.join([program("raypack"), "inspect", short(run_dir)])
    if finished:
        said["next"] = what_next(config)
    return lines + [f"{name:<12} {text}" for name, text in said.items() if text]


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


def worth(s: Summary, cluster: str) -> str:
    """This run's plans beside the baselines', for the same samples; "" where one of them was not modelled."""
    if s.plan_step_seconds is None or s.static_step_seconds is None or s.dynamic_step_seconds is None:
        return ""
    own = s.plan_step_seconds

    def plans(name: str, seconds: float, sent: Bytes) -> str:
        compared = "" if seconds is own else f" ({times(seconds, own)} x)"
        return f"{name} {seconds:,.2f} s{compared}, {megabytes(by_scope(sent)['inter'])} MB between nodes"

    each = [
        plans("this plan", own, s.comparable_bytes),
        plans("dynamic", s.dynamic_step_seconds, s.bytes_dynamic),
        plans("static", s.static_step_seconds, s.bytes_static),
    ]
    return f"{'; '.join(each)} (same samples, cost model of cluster {cluster})"


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
    """The command line of this process up to `argv`, its own arguments: interpreter and script, as they were typed."""
    words = sys.orig_argv
    own = len(words) - len(argv)
    return words[:own] if words[own:] == list(argv) else [sys.executable, *sys.argv[:1]]


def program(name: str) -> str:
    """How to call an installed command of this environment from here."""
    there = Path(sys.executable).with_name(name)
    return short(there) if there.exists() else name


def short(path: str | Path) -> str:
    """Relative to the current directory where it lies below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)
