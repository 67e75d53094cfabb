"""Output to the terminal: results on stdout, in colour if it is a terminal; progress on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shardwright.reports.report import Report, Style
    from shardwright.search.tree.planner import Progress

_STYLES: dict[Style, dict[str, Any]] = {
    "title": {"fg": "cyan", "bold": True}, "text": {}, "columns": {"dim": True}, "own": {"fg": "green"},
}  # fmt: skip


def show(report: Report, form: str = "text") -> None:
    """Print a report in the form that `--format` asks for: in colour on a terminal, and as wide as the terminal."""
    if form == "json":
        show_json(report.data())
        return
    if form == "markdown":
        click.echo(report.markdown(), nl=False)
        return
    color = False if os.environ.get("NO_COLOR") else None  # None: where it is a terminal
    for number, paragraph in enumerate(report.paragraphs()):
        if number:
            click.echo()
        for style, line in paragraph.set(_width()):
            click.echo(click.style(line, **_STYLES[style]), color=color)


def _width() -> int | None:
    """Return the columns of the terminal, or the value of COLUMNS; None where there is neither."""
    said = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty() or (said.isdecimal() and int(said)):
        return shutil.get_terminal_size().columns
    return None


def show_json(value: object) -> None:
    """Print plain data as JSON."""
    click.echo(json.dumps(value, indent=1))


def note(text: str) -> None:
    """Print a line for people on stderr."""
    click.echo(text, err=True)


@contextmanager
def progress(title: str) -> Generator[Progress]:
    """Yield a function that shows progress: a spinner on a terminal, plain lines elsewhere."""
    start = time.perf_counter()
    if not sys.stderr.isatty():
        yield lambda message: note(f"{title}: {message}")
        return
    from rich.console import Console

    with Console(stderr=True).status(title) as status:
        yield lambda message: status.update(f"{title}: {message} ({time.perf_counter() - start:.0f} s)")
