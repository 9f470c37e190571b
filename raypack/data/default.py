"""The embedded default corpus: the running Python's standard library, real long-tailed text that is everywhere."""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

from raypack.data.build import build_from_sources
from raypack.data.corpus import Corpus
from raypack.data.inputs import find_sources
from raypack.errors import RaypackError

PACKAGES = ("site-packages", "dist-packages")


def raypack_home() -> Path:
    """`RAYPACK_HOME`, absolute; default `~/raypack`."""
    return Path(os.environ.get("RAYPACK_HOME") or "~/raypack").expanduser().absolute()


def default_place(home: str | Path | None = None) -> Path:
    """Where the default corpus lies, or will."""
    return (Path(home) if home else raypack_home()).absolute() / "corpora" / f"stdlib-{platform.python_version()}"


def default_corpus(home: str | Path | None = None, *, progress: bool = True) -> Path:
    """The default corpus' directory below `home` (default `raypack_home()`), built where it is not there yet.

    Safe when several processes start at once: the first to finish wins, the others take its corpus.

    Raises:
        RaypackError: it cannot be built, or what is there is damaged.
    """
    out = default_place(home)
    if not out.exists():
        library = Path(sysconfig.get_path("stdlib"))
        sources = [
            source
            for source in find_sources([library])
            if source.path.suffix == ".py" and not set(PACKAGES) & set(source.path.relative_to(library).parts)
        ]
        try:
            build_from_sources(sources, ["the Python standard library"], out, bar=progress)
        except RaypackError:
            if not out.exists():
                raise
    Corpus.open(out)
    return out
