"""Names that people give: one of those that are shipped, or `package.module:object` of their own.

The one door for policies, layer kinds, attention kernels, tokenizers and sinks (docs/extending.md). A module of one's
own is looked for where Python looks and in the current directory; Ray takes both along to the run's planner, observer
and workers.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from raypack.errors import RaypackError
from raypack.near_miss import did_you_mean, near_miss

FOREIGN = "package.module:object"
_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_FOREIGN = re.compile(f"{_DOTTED}:{_DOTTED}")


def is_foreign(name: str) -> bool:
    """Whether `name` has the form `package.module:object`; nothing is imported."""
    return _FOREIGN.fullmatch(name) is not None


def unknown(name: str, known: Iterable[str]) -> str:
    """What is wrong with the form of a name, as the end of a sentence; "" where it is shipped or foreign."""
    if name in known or is_foreign(name):
        return ""
    near = near_miss(name, known)
    meant = did_you_mean(repr(near), "") + " " if near else ""
    return f"{meant}must be {', '.join(map(repr, known))} or {FOREIGN}"


def resolve(
    name: str, known: Mapping[str, Any], what: str, fits: Callable[[Any], bool] = callable, wanted: str = "a callable"
) -> Any:
    """The object of a name.

    Args:
        known: shipped objects by name; an object may be given as the `package.module:object` where it is, which is
            imported only when it is asked for.
        what: names the thing in errors, such as `plan.policy`.
        fits: whether a foreign object is of the right kind, and `wanted`, that kind in words.

    Raises:
        RaypackError: an unknown name, a module that is not there or fails, an object that it lacks or of another kind.
    """
    if name in known:
        found = known[name]
        return _load(found, what) if isinstance(found, str) else found
    if fault := unknown(name, known):
        raise RaypackError(f"{what} = {name!r}: {fault}")
    found = _load(name, what)
    if not fits(found):
        raise RaypackError(f"{what} = {name!r}: must be {wanted}, and is {_kind(found)}")
    return found


def blame(name: str, what: str, error: Exception) -> RaypackError:
    """What foreign code raised, as one line that says where."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return RaypackError(f"{what} = {name!r} failed: {' '.join(said.split())}{where}")


def source_digest(name: str) -> str:
    """Hex SHA-256 of the file that a foreign object's module is; "" where it has none. The module is imported.

    Raises:
        RaypackError: it cannot be imported.
    """
    file = getattr(_module(name, "name"), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _load(name: str, what: str) -> Any:
    found: Any = _module(name, what)
    path = name.partition(":")[2]
    for part in path.split("."):
        if not hasattr(found, part):
            near = near_miss(part, [each for each in vars(found) if not each.startswith("_")])
            meant = did_you_mean(near, "correct the name")
            raise RaypackError(f"{what} = {name!r}: {name.partition(':')[0]} has no {path}: {meant}")
        found = getattr(found, part)
    return found


def _module(name: str, what: str) -> Any:
    module = name.partition(":")[0]
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last: a file that lies around never takes the place of an installed package
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise RaypackError(
                f"{what} = {name!r}: there is no module {error.name} here or where Python looks; run from its "
                "directory, install it, or set PYTHONPATH"
            ) from None
        raise blame(name, what, error) from error
    except Exception as error:
        raise blame(name, what, error) from error


def _kind(found: Any) -> str:
    return f"the class {found.__name__}" if inspect.isclass(found) else f"of type {type(found).__name__}"
