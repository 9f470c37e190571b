"""What the docs say is there: links, paths, commands, settings, quoted errors, and maps that leave nothing out."""

from __future__ import annotations

import ast
import fnmatch
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import click
import pytest

from benchmarks.__main__ import names as benchmark_names
from raypack.cli import main as raypack_command
from raypack.config import Config

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("dashboards/*.md")])
FOLDERS = ("raypack", "jobs", "tests", "benchmarks", "dashboards", "kuberay", "docs", "examples")
SECTIONS = tuple(Config.model_fields)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
JOB_FLAGS = {"--run", "--dry-run", "--help", "--trace"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Without blocks of code, whose lines are indented or fenced."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def spans(page: Path) -> list[str]:
    """What stands between backticks, line breaks as spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def files() -> list[Path]:
    """Texts of the repository that people wrote."""
    kinds = {".py", ".md", ".toml", ".yaml", ".yml"}
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    return [*found, *(path for path in ROOT.iterdir() if path.suffix in kinds or path.name == "Makefile")]


@pages
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def alternatives(path: str) -> list[str]:
    """`a/{b,c}.py` -> `a/b.py`, `a/c.py`."""
    found = re.search(r"\{([^}]*)\}", path)
    if not found:
        return [path]
    return [p for part in found[1].split(",") for p in alternatives(path[: found.start()] + part + path[found.end() :])]


@pages
def test_paths_that_a_page_names_exist(page: Path) -> None:
    programs = {path.name for path in files() if path.suffix == ".py"}
    missing = []
    for span in spans(page):
        for path in alternatives(span):
            if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*-]*", path):
                missing += [] if any(ROOT.glob(path.rstrip("/"))) else [path]
            elif re.fullmatch(r"[\w*]+\.py", path):
                missing += [] if fnmatch.filter(programs, path) else [path]
    assert missing == []


def test_pages_that_are_cited_exist() -> None:
    cited = {(file, name) for file in files() for name in re.findall(r"\bdocs/[\w-]+\.\w+", file.read_text("utf-8"))}
    assert [(str(file), name) for file, name in cited if not (ROOT / name).exists()] == []


def test_no_text_cites_a_document_that_is_not_here() -> None:
    """A paper's section is cited with its year, a page of docs by its path."""
    foreign = re.compile(r"\bdesign,? (section|page|doc)|\bdesign\.md\b|\bby the design\b|\(sections? \d", re.I)
    own = Path(__file__)
    assert [str(f) for f in files() if f != own and foreign.search(" ".join(f.read_text("utf-8").split()))] == []


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each command line that a page shows, comments and continuations taken care of."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    shown = [line.strip() for line in text.splitlines() if line.startswith("    ")] + spans(page)
    for line in shown:
        if re.match(r"(raypack|python|make|ray job|torchrun) ", line):
            yield shlex.split(line.replace("...", ""), comments=True)


def unknown_flags(words: list[str]) -> list[str]:
    """Flags of `raypack ...` that its command does not have."""
    command: click.Command = raypack_command
    context = click.Context(command)
    while isinstance(command, click.Group):
        words = words[1:]
        inner = command.get_command(context, words[0]) if words else None
        if inner is None:
            break
        command = inner
        context = click.Context(command, parent=context)
    known = {flag for parameter in command.get_params(context) for flag in parameter.opts}
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [flag for flag in flags if flag not in known and not is_setting(flag[2:])]


def is_setting(name: str) -> bool:
    section, _, key = name.partition(".")
    return section in SECTIONS and key in Config.model_fields[section].annotation.model_fields


@pages
def test_commands_that_a_page_shows_have_these_options(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wrong = []
    for words in commands(page):
        if words[:2] == ["raypack", "train"] or any(word.startswith("jobs/train_") for word in words):
            own = words[next(i for i, word in enumerate(words) if word.startswith(("train", "jobs/train_"))) :]
            flags = [word for word in own if word.startswith("--")]
            wrong += [(words, flag) for flag in flags if flag not in JOB_FLAGS and not is_setting(flag[2:])]
        elif words[0] == "raypack":
            wrong += [(words, flag) for flag in unknown_flags(words)]
        elif words[0] == "make":
            wrong += [(words, word) for word in words[1:2] if "=" not in word and word not in targets]
        elif "benchmarks" in words and "--only" in words:
            name = words[words.index("--only") + 1]
            wrong += [] if name in (*benchmark_names(), "NAME") else [(words, name)]
    assert wrong == []


@pages
def test_settings_that_a_page_names_exist(page: Path) -> None:
    named = re.compile(rf"(?:--)?((?:{'|'.join(SECTIONS)})\.[a-z0-9_]+)")
    settings = [found[1] for span in spans(page) if (found := named.match(span)) and not span.endswith(".py")]
    assert [name for name in settings if not is_setting(name)] == []


@lru_cache
def said() -> str:
    """All texts in raypack's source, one a line, with what is filled in at run time as " ... "."""
    texts = []
    for path in (ROOT / "raypack").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else " ... " for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_errors_that_the_docs_quote_are_raised() -> None:
    """Of every quoted error its longest part without figures and names stands in the source."""
    page = ROOT / "docs" / "troubleshooting.md"
    rows = re.findall(r"^\| (.*?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [span for row in rows for span in re.findall(r"`([^`]+)`", row) if " " in span]
    parts = [max(re.split(r" ?\.\.\.|[\d.,]+|\[|\]|: |\?|--?\S+|\bN\b|\w+\.\w+| = ", span), key=len) for span in quoted]
    assert len(parts) > 20
    assert [part for part in parts if part.strip() not in said()] == []


@pytest.mark.parametrize(("head", "folder"), [("decides", "planning"), ("has", "planning/search")])
def test_the_maps_of_planning_name_every_file_and_no_other(head: str, folder: str) -> None:
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    table = text[text.index(f"| file | {head} |") :].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {path.stem for path in (ROOT / "raypack" / folder).glob("*.py")} - {"__init__"}


def test_the_map_of_the_house_names_every_part_of_the_package() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    house = text[text.index("## The map of the house") :].partition("\n## ")[0]
    parts = [p.name for p in (ROOT / "raypack").iterdir() if p.name not in ("__init__.py", "__pycache__")]
    assert [name for name in parts if not re.search(rf"[`/]{re.escape(name)}/?`", house)] == []


def test_the_map_of_tests_names_every_file() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tests = text[text.index("## The map of tests") :].partition("\n## ")[0]
    named = re.findall(r"`(test_[\w*]+\.py)`", tests)
    files_ = [path.name for path in (ROOT / "tests").glob("test_*.py")]
    assert [name for name in files_ if not any(fnmatch.fnmatch(name, pattern) for pattern in named)] == []


def test_the_first_page_leads_to_every_other() -> None:
    entries = ("README.md", "CONTRIBUTING.md")
    links = {link for name in entries for link in re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text("utf-8"))}
    assert [str(p.relative_to(ROOT)) for p in PAGES if str(p.relative_to(ROOT)) not in links | {"README.md"}] == []
