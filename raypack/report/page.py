"""A run as one HTML page that needs nothing else: no script, no font, no file beside it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from raypack.errors import RaypackError
from raypack.files import write_file
from raypack.observe.record import StepRecord
from raypack.observe.summary import Summary
from raypack.report.console import COLUMNS, cells, summary_rows
from raypack.report.plots import Plot, plots
from raypack.report.stored_run import StoredRun

PAGE_FILE = "page.html"
LAST_STEPS = 20

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1a1a1a;
       background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
.steps td, .steps th { text-align: right; } .steps .text { text-align: left; } .wide { overflow-x: auto; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; }
figure { margin: 0; display: table; max-width: 100%; } figure svg { max-width: 100%; height: auto; }
figcaption { display: table-caption; caption-side: bottom; font-size: .85rem; color: #555; }
figcaption b { color: #1a1a1a; }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto; font-size: .8rem; }
.note { color: #8a4b00; }
"""


def write_page(run_dir: str | Path, target: str | Path | None = None) -> Path:
    """Write the page of a run, by default into its directory, and say where. Imports neither torch nor Ray.

    The run may go on, have ended, or have been killed, and need not have done a step.

    Raises:
        RaypackError: no run there, files that are none of a run's, or a page that cannot be written or drawn.
        OSError: files that cannot be read.
    """
    target = Path(target or Path(run_dir) / PAGE_FILE)
    try:
        write_file(target, page(StoredRun.read(run_dir)))
    except (OSError, RaypackError):
        raise
    except Exception as error:  # a drawing library's; whoever ends a run must not end by it
        raise RaypackError(f"cannot draw the page of {run_dir}: {error!r}") from error
    return target


def page(run: StoredRun, plan: Plot | None = None, plan_rows: str = "") -> str:
    """The whole page; `plan`, `plan_rows` = picture and text of one step's plan, where asked for."""
    records, summary = run.records, run.summary
    parts = [_summary(summary), "<h2>Plots</h2>", figures(plots(records))]
    if plan:
        parts += [f"<h2>{html.escape(plan.title)}</h2>", figures([plan]), f"<pre>{html.escape(plan_rows)}</pre>"]
    parts += ["<h2>Attempts</h2>", _attempts(records, summary.ends), "<h2>Last steps</h2>", _last_steps(records)]
    if run.config:
        parts += ["<h2>Configuration</h2>", f"<pre>{html.escape(run.config)}</pre>"]
    return document(f"raypack run {run.name}".strip(), parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A page of its own; `parts` = markup, `title` = text."""
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _summary(summary: Summary) -> str:
    rows = [
        f"<tr{' class=note' if name == 'note' else ''}><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
        for name, text in summary_rows(summary)
    ]
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def figures(made: Iterable[Plot]) -> str:
    """Plots with their captions."""
    drawn = []
    for plot in made:
        caption = f"<b>{html.escape(plot.title)}.</b> {html.escape(plot.about)}"
        drawn.append(f"<figure>{plot.svg}<figcaption>{caption}</figcaption></figure>")
    if not drawn:
        return '<p class="note">No step is on record yet.</p>'
    return '<div class="plots">\n' + "\n".join(drawn) + "\n</div>"


def _attempts(records: Sequence[StepRecord], ends: Mapping[int, str]) -> str:
    by_attempt: dict[int, list[StepRecord]] = {}
    for record in records:
        by_attempt.setdefault(record.attempt, []).append(record)
    rows = [
        [
            str(attempt),
            f"{each[0].step} to {each[-1].step}",
            str(sum(record.effective for record in each)),
            str(each[-1].world),
            str(each[-1].nodes),
            f"{sum(record.seconds for record in each):,.1f}",
            ends.get(attempt, ""),
        ]
        for attempt, each in sorted(by_attempt.items())
    ]
    return table(["attempt", "steps", "of them counted", "ranks", "nodes", "seconds", "ended"], rows)


def _last_steps(records: Sequence[StepRecord]) -> str:
    shown = [cells(record) for record in records if record.effective][-LAST_STEPS:]
    columns = [name for name in COLUMNS if any(row[name] for row in shown)]
    return table(columns, [[row[name] for name in columns] for row in shown])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 0) -> str:
    """Of figures, but for the first `texts` columns; it scrolls where it is wider than the page."""
    head = _cells("th", heads, texts)
    body = "\n".join(f"<tr>{_cells('td', row, texts)}</tr>" for row in rows)
    return f'<div class="wide"><table class="steps">\n<tr>{head}</tr>\n{body}\n</table></div>'


def _cells(tag: str, row: Sequence[str], texts: int) -> str:
    kinds = [' class="text"'] * texts + [""] * (len(row) - texts)
    return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))
