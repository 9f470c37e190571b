"""What a job script calls: arguments in, exit code out. Every fault is one line on standard error."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from raypack.config import Config
from raypack.config.runfile import read_request
from raypack.errors import RaypackError


def main(argv: Sequence[str], default: Path, description: str, program: str = "") -> int:
    """Run a job's arguments, or with `--dry-run` say what they would run.

    Args:
        argv: without the program's name.
        default: run file used where `--run` names none.
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
        _choose_authentication(asked.config)
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


def _choose_authentication(config: Config) -> None:
    """A Ray of our own asks for a token, whatever this Ray version's default is; read when Ray is imported.

    A cluster that is there already has made its choice.
    """
    if not (config.run.ray_address or os.environ.get("RAY_ADDRESS")):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
