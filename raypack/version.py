"""Which code runs: ranks with different files must not train together, whatever version they call themselves."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from functools import lru_cache
from pathlib import Path

__version__ = "0.1.0"


def build() -> dict[str, str]:
    """Versions of what a run depends on, by name; `code` = the digest of `code_version`."""
    version, code = code_version().rsplit("+", 1)
    others = {name: importlib.metadata.version(name) for name in ("torch", "ray")}
    return {"version": version, "code": code, **others, "python": platform.python_version()}


@lru_cache(maxsize=1)
def code_version() -> str:
    """The package's version and a digest of its source files."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:16]}"
