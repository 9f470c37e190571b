"""A run as one HTML page that needs nothing else: no script, no font, no file beside it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from raypack.errors import RaypackError
from raypack.observe.console import COLUMNS, cells, summary_rows
from raypack.observe.plots import Plot, plots
from raypack.observe.record import StepRecord
from raypack.observe.summary import Summary
from raypack.observe.tail import CONFIG_FILE

LAST_STEPS = 20

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1a1a1a;
       background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
.steps td, .steps th { text-align: right; } .wide { overflow-x: auto; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; }
figure { margin: 0; display: table; max-width: 100%; } figure svg { max-width: 100%; height: auto; }
figcaption { display: table-caption; caption-side: bottom; font-size: .85rem; color: #555; }
figcaption b { color: #1a1a1a; }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto; font-size: .8rem; }
.note { color: #8a4b00; }
"""


def page(
    summary: Summary, records: Sequence[StepRecord], config: str = "", plan: Plot | None = None, plan_rows: str = ""
) -> str:
    """The whole page.

    Args:
        summary: of the records.
        records: resolved (`steps.resolve`).
        config: the run's `config.toml`, where it is there.
        plan, plan_rows: picture and text of one step's plan, where asked for.
    """
    title = f"raypack run {summary.run}".strip()
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _summary(summary),
        f"<h2>Plots</h2>\n{_figures(plots(records))}",
        *(
            [f"<h2>{html.escape(plan.title)}</h2>\n{_figures([plan])}<pre>{html.escape(plan_rows)}</pre>"]
            if plan
            else []
        ),
        f"<h2>Attempts</h2>\n{_attempts(records, summary.ends)}",
        f"<h2>Last steps</h2>\n{_last_steps(records)}",
    ]
    if config:
        parts.append(f"<h2>Configuration</h2>\n<pre>{html.escape(config)}</pre>")
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def config_text(run_dir: Path) -> str:
    """The run's configuration as it was written, "" where there is none.

    Raises:
        RaypackError: the file cannot be read.
    """
    path = run_dir / CONFIG_FILE
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RaypackError(f"cannot read {path}: {error}") from None


def _summary(summary: Summary) -> str:
    rows = [
        f"<tr{' class=note' if name == 'note' else ''}><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
        for name, text in summary_rows(summary)
    ]
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _figures(made: Iterable[Plot]) -> str:
    figures = []
    for plot in made:
        caption = f"<b>{html.escape(plot.title)}.</b> {html.escape(plot.about)}"
        figures.append(f"<figure>{plot.svg}<figcaption>{caption}</figcaption></figure>")
    if not figures:
        return '<p class="note">No step is on record yet.</p>'
    return '<div class="plots">\n' + "\n".join(figures) + "\n</div>"


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
    return _table(["attempt", "steps", "of them counted", "ranks", "nodes", "seconds", "ended"], rows)


def _last_steps(records: Sequence[StepRecord]) -> str:
    shown = [cells(record) for record in records if record.effective][-LAST_STEPS:]
    columns = [name for name in COLUMNS if any(row[name] for row in shown)]
    return _table(columns, [[row[name] for name in columns] for row in shown])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="steps">\n<tr>{head}</tr>\n{body}\n</table></div>'
