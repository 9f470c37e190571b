"""`raypack data`: build a corpus, and look at one (or at a length file)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from raypack.commands.common import (
    STANDARD_OUTPUT,
    OutputFolder,
    handle_errors,
    json_option,
    people_console,
    write_json,
)
from raypack.data.build import build_corpus
from raypack.data.corpus import Corpus, CorpusHeader
from raypack.data.lengths import READERS, LengthStatistics, length_statistics, read_lengths
from raypack.data.tokenizer import TOKENIZERS
from raypack.registry import FOREIGN

BAR_CELLS = 24


@click.group()
def data() -> None:
    """Build corpora from text, and look at them."""


@data.command(context_settings={"show_default": True})
@click.option(
    "--input",
    "inputs",
    metavar="PATH",
    multiple=True,
    required=True,
    help="File or folder (with all below it, hidden entries left out): .jsonl and .jsonl.gz hold one document a "
    "line, any other UTF-8 file is one document. Repeat for more.",
)
@click.option(
    "--out",
    metavar="CORPUS",
    required=True,
    type=OutputFolder(),
    help="Directory to make; it appears only when complete.",
)
@click.option("--holdout", type=float, default=0.01, metavar="SHARE", help="Share of the documents to hold out.")
@click.option("--text-field", default="text", metavar="KEY", help="Key of the text in .jsonl lines.")
@click.option("--tokenizer", default="byte", help=f"What makes tokens of text: {', '.join(TOKENIZERS)}, or {FOREIGN}.")
@click.option("--force", is_flag=True, help="Replace a corpus that is there.")
@json_option
@handle_errors
def build(
    *,
    inputs: tuple[str, ...],
    out: str,
    holdout: float,
    text_field: str,
    tokenizer: str,
    force: bool,
    json_target: str | None,
) -> None:
    """Tokenise text into a corpus directory."""
    header = build_corpus(inputs, out, tokenizer=tokenizer, holdout=holdout, text_field=text_field, force=force)
    if json_target != STANDARD_OUTPUT:
        _print_header(people_console(), out, header)
    if json_target:
        write_json({"corpus": str(Path(out).absolute()), **header.model_dump(mode="json")}, json_target)


@data.command()
@click.argument("source", metavar="CORPUS|LENGTHS")
@click.option("--verify", is_flag=True, help="Read the whole corpus and compare it with its fingerprint.")
@json_option
@handle_errors
def stats(source: str, verify: bool, json_target: str | None) -> None:
    """Lengths of a corpus (both splits), or of a length file (.txt, .npy, .npz, .parquet), in tokens."""
    path, header = Path(source), None
    if path.is_file() or (path.suffix in READERS and not path.exists()):
        lengths = read_lengths(path)
    else:
        corpus = Corpus.open(source)
        if verify:
            corpus.verify()
        header, lengths = corpus.header, corpus.lengths
    figures = length_statistics(lengths)
    if json_target != STANDARD_OUTPUT:
        console = people_console()
        if header:
            _print_header(console, source, header)
        _print_statistics(console, source, figures)
    if json_target:
        write_json({"source": source, **_header_data(header), **asdict(figures)}, json_target)


def _header_data(header: CorpusHeader | None) -> dict[str, Any]:
    return {"corpus": header.model_dump(mode="json")} if header else {}


def _print_header(console: Console, path: str, header: CorpusHeader) -> None:
    console.print(f"corpus {path}", highlight=False, soft_wrap=True)
    table = Table("", _number("documents"), _number("tokens"))
    held = header.holdout
    table.add_row("training", f"{header.documents - held.documents:,}", f"{header.tokens - held.tokens:,}")
    table.add_row("held out", f"{held.documents:,}", f"{held.tokens:,}")
    console.print(table)
    origin = header.provenance
    console.print(
        f"tokenizer {header.tokenizer}, vocabulary {header.vocabulary:,}, fingerprint {header.fingerprint[:16]}; "
        f"skipped {origin.skipped_empty:,} empty documents and {origin.skipped_binary:,} files that are no text",
        highlight=False,
        soft_wrap=True,
    )


def _print_statistics(console: Console, name: str, figures: LengthStatistics) -> None:
    console.print(f"lengths in {name}", highlight=False, soft_wrap=True)
    summary = Table("figure", _number("tokens"))
    rows = {"all": figures.tokens, "mean": round(figures.mean), "shortest": figures.shortest}
    for label, value in {**rows, **figures.percentiles, "longest": figures.longest}.items():
        summary.add_row(label, f"{value:,}")
    console.print(summary)

    table = Table(
        _number("from tokens"),
        _number("documents"),
        Column("share", no_wrap=True, min_width=BAR_CELLS + 6),
        _number("of tokens"),
        _number("of n²"),
    )
    most = max(each.documents for each in figures.histogram)
    for each in figures.histogram:
        bar = "█" * -(-each.documents * BAR_CELLS // most)
        table.add_row(
            f"{each.low:,}",
            f"{each.documents:,}",
            f"{bar} {each.documents / figures.documents:.1%}",
            f"{each.tokens / figures.tokens:.1%}",
            f"{each.squares_share:.1%}",
        )
    console.print(table)
    console.print(
        f"{figures.documents:,} documents; the longest 1 % hold {figures.top_percent_squares_share:.1%} of the sum of "
        "squared lengths (n²)",
        highlight=False,
        soft_wrap=True,
    )


def _number(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)
