"""The command ``lightning-pfl compare RUN...``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightning_pfl.results.comparison import BASELINES, Comparison, compare

if TYPE_CHECKING:
    from pandas import DataFrame


LEFT_TO_FILES = ("worst client", "sd over clients", "seconds", "rounds")
"""Columns for which a terminal is too narrow."""


def compare_parser() -> ArgumentParser:
    """Make the parser of ``lightning-pfl compare``."""
    parser = ArgumentParser(
        "lightning-pfl compare",
        allow_abbrev=False,
        description="Compare finished runs: mean and standard deviation over seeds, differences "
        "over clients, and with --html a page of pictures.",
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="a run's folder, a folder above runs, or a glob")
    default = "the first that is neither a loss nor an error"
    add("--metric", help=f"the validation value to compare, such as val_acc (default: {default})")
    add("--rounds", type=int, help="compare after this many rounds (default: finished runs)")
    add(
        "--baselines",
        nargs="*",
        metavar="METHOD",
        default=list(BASELINES),
        help=f"methods to compare with, client by client (default: {' '.join(BASELINES)})",
    )
    for name, what in (
        ("html", "the page"),
        ("csv", "the table, with numbers in full"),
        ("markdown", "the table"),
        ("latex", "the table, for the package booktabs"),
        ("clients", "each client's values, as csv"),
    ):
        add(f"--{name}", type=Path, metavar="FILE", help=f"write {what}")
    return parser


def run_compare(words: Sequence[str]) -> None:
    """Compare runs, print the tables and write the files that were asked for.

    Args:
        words: The command line after ``lightning-pfl compare``.
    """
    parser = compare_parser()
    given = parser.parse_args(words)
    try:
        comparison = compare(
            *given.runs, metric=given.metric, rounds=given.rounds, baselines=given.baselines
        )
        print_comparison(comparison)
        _write(comparison, given.html, given.csv, given.markdown, given.latex, given.clients)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.error(str(error))


def print_comparison(comparison: Comparison) -> None:
    """Print the tables and the notes."""
    # What reads a pipe has no width, and rich's guess of 80 is narrow.
    console = Console(width=None if sys.stdout.isatty() else 120)
    shown = comparison.shown.drop(columns=[*LEFT_TO_FILES], errors="ignore")
    console.print(_table(shown, "Mean over clients in the last ten rounds, ± over runs"))
    for about, rows in comparison.shown_differences.groupby(
        comparison.shown_differences.columns.intersection(["data", "against"]).tolist(), sort=False
    ):
        *data, base = about
        title = ", ".join([f"What each client gains against {base}, in the mean", *data])
        console.print(_table(rows.drop(columns=["data", "against"], errors="ignore"), title))
    for note in comparison.notes:
        console.print(Text(f"- {note}"))


def _table(frame: DataFrame, title: str) -> Table:
    words = ("data", "method", "verdict")
    columns = [Column(name, no_wrap=name not in words, overflow="fold") for name in frame.columns]
    table = Table(
        *columns,
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for row in frame.itertuples(index=False):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _write(
    comparison: Comparison,
    html: Path | None,
    csv: Path | None,
    markdown: Path | None,
    latex: Path | None,
    clients: Path | None,
) -> None:
    """Write the files that have a name, and print it."""
    for path in filter(None, (html, csv, markdown, latex, clients)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if html:
        comparison.to_html(html)
    if csv:
        comparison.to_csv(csv)
    if markdown:
        markdown.write_text(comparison.to_markdown())
    if latex:
        latex.write_text(comparison.to_latex())
    if clients:
        comparison.clients.to_csv(clients, index=False)
    for path in filter(None, (html, csv, markdown, latex, clients)):
        print(f"written: {path}")
