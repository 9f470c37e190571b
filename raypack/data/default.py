"""The embedded default corpus: definitions of the running Python's standard library, real long-tailed text that is
everywhere.

A document is a top-level function or class with its decorators, or what stands between two; a class of more than
`CLASS_BYTES` comes apart into its methods in the same way. Tests, demos and generated tables are left out.
"""

from __future__ import annotations

import json
import platform
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from raypack.data.build import build_from_sources
from raypack.data.corpus import Corpus
from raypack.data.inputs import Source, find_sources
from raypack.errors import RaypackError
from raypack.files import raypack_home

LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "encodings",
}
CLASS_BYTES = 4096
"""About the longest document that a small run takes whole."""


def default_corpus_path(home: str | Path | None = None) -> Path:
    """Where the default corpus lies, or will."""
    return (Path(home) if home else raypack_home()).absolute() / "corpora" / f"definitions-{platform.python_version()}"


def default_corpus(home: str | Path | None = None, *, progress: bool = True) -> Path:
    """The default corpus' directory below `home` (default `raypack_home()`), built where it is not there yet.

    Safe when several processes start at once: the first to finish wins, the others take its corpus.

    Raises:
        RaypackError: it cannot be built, or what is there is damaged.
    """
    out = default_corpus_path(home)
    if not out.exists():
        with tempfile.TemporaryDirectory() as folder:
            texts = Path(folder) / "definitions.jsonl"
            _write_definitions(texts)
            try:
                given = ["definitions of the Python standard library"]
                build_from_sources([Source(texts, texts.stat().st_size)], given, out, bar=progress)
            except RaypackError:
                if not out.exists():
                    raise
    Corpus.open(out)
    return out


def _write_definitions(out: Path) -> None:
    """One line of `.jsonl` a document."""
    library = Path(sysconfig.get_path("stdlib"))
    with out.open("w", encoding="utf-8") as file:
        for source in find_sources([library]):
            if source.path.suffix != ".py" or LEFT_OUT & set(source.path.relative_to(library).parts):
                continue
            try:
                text = source.path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a module that declares another encoding
                continue
            for definition in definitions_of(text):
                file.write(json.dumps({"text": definition}) + "\n")


def definitions_of(text: str) -> Iterator[str]:
    """The documents of one module. Together they are its text, but for what is only white space."""
    for part in _cut(text, indent=0):
        if len(part) > CLASS_BYTES and re.search(r"^class ", part, re.MULTILINE):
            yield from _cut(part, indent=4)
        else:
            yield part


def _cut(text: str, indent: int) -> Iterator[str]:
    """`text` cut before each definition of that indentation, or before the first of its decorators."""
    begins = re.compile(rf"^ {{{indent}}}(?:(@)|class |def |async def )", re.MULTILINE)
    cuts, decorated = [0], False
    for found in begins.finditer(text):
        if not decorated:
            cuts.append(found.start())
        decorated = found.group(1) is not None
    for first, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        if not text[first:end].isspace() and end > first:
            yield text[first:end]
