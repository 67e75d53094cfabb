"""What goes to the terminal: results on stdout, in colour where it is one; progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from shardwright.reports.report import Paragraph, Report
    from shardwright.search.planner import Progress


def show(report: Report, form: str = "text") -> None:
    """Print a report in the form that `--format` asks for: text is set by rich on a terminal, and plain elsewhere."""
    if form == "json":
        show_json(report.data())
    elif not sys.stdout.isatty():
        click.echo(str(report), nl=False)
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for paragraph in report.paragraphs():
            _show_paragraph(console, paragraph)


def _show_paragraph(console: Console, paragraph: Paragraph) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console.print(Text(paragraph.title, style="bold cyan"))
    for line in paragraph.lines:
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    if paragraph.columns:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for column in paragraph.columns:
            right = column.startswith(">")
            table.add_column(Text(column.removeprefix(">")), justify="right" if right else "left", no_wrap=right)
        for row in paragraph.rows:
            table.add_row(*map(Text, row), style="green" if row[0] == "this plan" else "")
        console.print(Padding(table, (0, 0, 0, 2)))
    console.print()


def show_json(value: object) -> None:
    """Print plain data as JSON."""
    click.echo(json.dumps(value, indent=1))


def note(text: str) -> None:
    """A line for people, on stderr."""
    click.echo(text, err=True)


@contextmanager
def progress(title: str) -> Generator[Progress]:
    """A function that shows what is going on: a spinner on a terminal, plain lines elsewhere."""
    start = time.perf_counter()
    if not sys.stderr.isatty():
        yield lambda message: note(f"{title}: {message}")
        return
    from rich.console import Console

    with Console(stderr=True).status(title) as status:
        yield lambda message: status.update(f"{title}: {message} ({time.perf_counter() - start:.0f} s)")
