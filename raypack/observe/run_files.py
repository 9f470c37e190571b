"""The files of a run directory: each name stands here and nowhere else (docs/use.md)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from raypack.errors import RaypackError
from raypack.files import replace_file
from raypack.plan.plan import Plan

CONFIG_FILE = "config.toml"
STEPS_FILE = "steps.jsonl"
SUMMARY_FILE = "summary.json"
ENDPOINT_FILE = "metrics.json"
FAILURE_FILE = "failure.txt"
LOCK_FILE = ".lock"
PLAN_FOLDER = "plans"


def plan_file(run_dir: Path, step: int) -> Path:
    """Where `plan.keep` writes a step's plan."""
    return run_dir / PLAN_FOLDER / f"step-{step:08d}.json"


def keep_plan(run_dir: Path, plan: Plan) -> None:
    """Write `plans/step-00000012.json`, before the step runs, so that a step that fails can be replayed.

    Raises:
        RaypackError: it cannot be written.
    """
    file = plan_file(run_dir, plan.step)
    try:
        file.parent.mkdir(exist_ok=True)
        replace_file(file, plan.to_json() + "\n")
    except OSError as error:
        raise unwritable(run_dir, error) from None


def unwritable(run_dir: Path, error: OSError, setting: str = "run.root") -> RaypackError:
    """What a person can do about a run directory that cannot be written."""
    return RaypackError(f"cannot write to {run_dir}: {error.strerror or error}; choose another {setting}")


def is_live(run_dir: Path) -> bool:
    """Whether the run's observer says that it serves; a run that was killed says so for ever."""
    try:
        return bool(json.loads((run_dir / ENDPOINT_FILE).read_text(encoding="utf-8"))["serving"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def steps_of(run_dir: Path) -> int:
    """Steps of the whole run as its settings say, 0 where they do not; settings of another version are no fault."""
    try:
        return int(tomllib.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["run"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
