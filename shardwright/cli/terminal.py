"""What goes to the terminal: results on stdout, in colour where it is one; progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from shardwright.reports.sections import Explanation, Section

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str], None]


def show(explanation: Explanation | Section) -> None:
    """Print an explanation: set by rich on a terminal, plain text elsewhere."""
    if not sys.stdout.isatty():
        click.echo(str(explanation).rstrip("\n"))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for section in explanation.sections if isinstance(explanation, Explanation) else (explanation,):
        _show_section(console, section)


def _show_section(console: Console, section: Section) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console.print(Text(section.title, style="bold cyan"))
    for line in section.lines:
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    if section.table:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for title, right in section.table.columns:
            table.add_column(Text(title), justify="right" if right else "left", no_wrap=right)
        for row in section.table.rows:
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
