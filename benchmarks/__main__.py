"""Run the benchmarks of this folder: `python -m benchmarks [--only NAME] [--quick] [--list]`.

A benchmark is a module with `main(quick: bool) -> None` that prints its tables. One that fails is named at the end
and makes the exit code 1; the others still run.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
import traceback

import click
from rich.console import Console

import benchmarks


def names() -> list[str]:
    """Modules of this folder that may hold a benchmark, in the order they run."""
    return sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))


def run(name: str, quick: bool, console: Console) -> bool:
    """Run one benchmark; False where it failed. A module without `main`, a baseline, is passed over."""
    try:
        main = getattr(importlib.import_module(f"benchmarks.{name}"), "main", None)
        if main is None:
            return True
        console.rule(name)
        start = time.perf_counter()
        main(quick)
        console.print(f"[dim]{name}: {time.perf_counter() - start:.1f} s[/dim]")
    except Exception:
        traceback.print_exc()
        return False
    return True


@click.command(help=__doc__)
@click.option("--only", multiple=True, metavar="NAME", help="run just this one; may be repeated")
@click.option("--quick", is_flag=True, help="smaller sizes: does it run, not how fast is it")
@click.option("--list", "list_only", is_flag=True, help="print the names and stop")
def main(only: tuple[str, ...], quick: bool, list_only: bool) -> None:
    known = names()
    if list_only:
        click.echo("\n".join(known))
        return
    unknown = sorted(set(only) - set(known))
    if unknown:
        click.echo(f"error: no benchmark {unknown[0]!r}: there are {', '.join(known) or 'none'}", err=True)
        sys.exit(2)
    console = Console()
    failed = [name for name in (only or known) if not run(name, quick, console)]
    if failed:
        click.echo(f"error: failed: {', '.join(failed)}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
