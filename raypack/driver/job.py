"""What `raypack train` and the job scripts call: arguments in, exit code out. Every fault is one line on standard
error."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from raypack.config import Config
from raypack.config.runfile import DEFAULT, load_run, read_request, with_name
from raypack.errors import RaypackError
from raypack.files import absolute


def main(argv: Sequence[str], default: str = DEFAULT, description: str = "", program: str = "") -> int:
    """Run a job's arguments, or with `--dry-run` say what they would run.

    Args:
        argv: without the program's name.
        default: run preset or file where the arguments name none.
        description: shown by `--help`.
        program: what `--help` calls it; default the script's name.

    Returns:
        exit code: 0; 2 after a fault; 130 after Ctrl-C, 143 after SIGTERM; 1 for what should not happen.
    """
    terminated: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        """SIGTERM, as `ray job stop` sends it, ends a run the way Ctrl-C does."""
        terminated.append(number)  # Ray may turn what is raised here into an interrupt of its own
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        asked = read_request(argv, default, description, program)
        _prepare_environment(asked.config)
        # torch and Ray take seconds to import: a mistyped flag should not.
        if asked.dry_run:
            from raypack.driver.dry_run import dry_run

            dry_run(asked.config)
        else:
            _run(asked.config, argv)
    except RaypackError as error:
        return _failed(str(error), 2)
    except KeyboardInterrupt:
        if terminated:
            return _failed("stopped by SIGTERM", 128 + signal.SIGTERM)
        return _failed("interrupted", 128 + signal.SIGINT)
    except Exception as error:
        traceback.print_exc()
        return _failed(f"{type(error).__name__}: {error} (a fault of raypack: please report the lines above)", 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def train(run: Config | Sequence[str] = ()) -> Path:
    """Train from start to end, with this process as the run's driver, and say so on standard output.

    Args:
        run: settings, or the arguments of `raypack train`: `["1f3s_local", "--run.steps", "10"]`.

    Returns:
        The run's directory: records, checkpoints and `summary.json` (docs/use.md).

    Raises:
        RaypackError: a check before the start failed, or the run did; records so far are kept.
    """
    config = with_name(run, "run") if isinstance(run, Config) else load_run(run)
    _prepare_environment(config)
    _run(config, [])
    return absolute(config.run.root) / config.run.name


def _run(config: Config, argv: Sequence[str]) -> None:
    from rich.console import Console

    from raypack.report.view import RunView

    with RunView(Console(), config.run.steps, table=config.observe.table) as view:
        with view.phase("torch and Ray") as said:
            from raypack.driver.last_lines import typed_before
            from raypack.driver.launch import launch

            said.append("imported")
        launch(config, view, typed_before(argv))


def _failed(line: str, code: int) -> int:
    print("error:", " ".join(line.split()), file=sys.stderr)
    return code


def _prepare_environment(config: Config) -> None:
    """What torch and Ray read when they are imported.

    A Ray of our own asks for a token, whatever this Ray version's default is; a cluster that is there already has made
    its choice. And every step has other sizes: as it comes, the CUDA allocator fragments.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if not (config.run.ray_address or os.environ.get("RAY_ADDRESS")):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
