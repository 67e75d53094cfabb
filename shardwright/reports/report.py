"""The base of every report: paragraphs of text for people, and the same as plain data for programs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.pcg.errors import printable
from shardwright.reports.setting import table, wrapped

Style = Literal["title", "text", "columns", "own"]
"""The kind of a line, by which it gets its colour; "own": a row about the plan itself."""
OWN = "this plan"
_INDENT = "  "


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A title, lines of text, a table, and notes below it; each may be empty.

    A column called `>title` is flush right, for numbers.
    """

    title: str
    lines: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Make all text printable: names in a plan file may hold anything, and must not steer a terminal."""
        object.__setattr__(self, "title", printable(self.title))
        for name in ("lines", "notes"):
            object.__setattr__(self, name, tuple(map(printable, getattr(self, name))))
        object.__setattr__(self, "rows", tuple(tuple(printable(x, "") for x in row) for row in self.rows))

    def __str__(self) -> str:
        return "\n".join(line for _, line in self.set())

    def set(self, width: int | None = None) -> Iterator[tuple[Style, str]]:
        """Yield the lines, wrapped to `width` columns if it is given."""
        inner = None if width is None else max(width - len(_INDENT), 1)
        for line in wrapped(self.title, width):
            yield "title", line
        for style, lines in self._inside(inner):
            for line in lines:
                yield style, _INDENT + line

    def markdown(self) -> str:
        """Return the same in Markdown: a heading, a list, a table, and a list; drawings as they are."""
        parts = [f"## {marked_down(self.title)}", *_list(self.lines)]
        if self.columns:
            sides = ["--:" if column.startswith(">") else "---" for column in self.columns]
            titles = [column.removeprefix(">") for column in self.columns]
            parts.append(
                "\n".join(map(_row, (map(marked_down, titles), sides, *(map(_cell, row) for row in self.rows))))
            )
        return "\n\n".join([*parts, *_list(self.notes)]) + "\n"

    def _inside(self, width: int | None) -> Iterator[tuple[Style, list[str]]]:
        for line in self.lines:
            yield "text", wrapped(line, width)
        for row, lines in table(self.columns, self.rows, width) if self.columns else ():
            yield "columns" if row is None else "own" if self.rows[row][0] == OWN else "text", lines
        for line in self.notes:
            yield "text", wrapped(line, width)


_SPECIAL = re.compile(r"([\\`*~<>\[\]|]|(?<!\w)_|_(?!\w)|(?<!\S)#)")
_LABELLED = re.compile(r"(\S(?:.*?\S)?) {2,}(.*)")
_DRAWN = re.compile("[│├└]")


def marked_down(text: str) -> str:
    """Return the text with every special character of Markdown or HTML escaped."""
    return _SPECIAL.sub(r"\\\1", text.replace("&", "&amp;").replace("\n", " "))


def _list(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines as a list: indented lines are nested, labels are bold, and a drawing is a block."""
    if any(map(_DRAWN.search, lines)):
        fence = "`" * (1 + max([2, *(len(run) for line in lines for run in re.findall("`+", line))]))
        yield "\n".join((fence, *lines, fence))
    elif lines:
        yield "\n".join(map(_item, lines))


def _item(line: str) -> str:
    text = line.strip()
    labelled = _LABELLED.fullmatch(text)
    text_of_item = f"**{marked_down(labelled[1])}** {marked_down(labelled[2])}" if labelled else marked_down(text)
    return f"{'  ' if line.startswith(' ') else ''}- {text_of_item}"


def _cell(text: str) -> str:
    inner = text.lstrip(" ")
    return "&nbsp;" * (len(text) - len(inner)) + marked_down(inner)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


class Report(ABC):
    """A result to show. `str` is plain text; the command line sets the paragraphs in colour."""

    @abstractmethod
    def paragraphs(self) -> Sequence[Paragraph]:
        """Return the paragraphs for people."""

    @abstractmethod
    def data(self) -> object:
        """Return the data for programs, which becomes JSON."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.paragraphs())) + "\n"

    def markdown(self) -> str:
        """Return the whole report in Markdown."""
        return "\n".join(paragraph.markdown() for paragraph in self.paragraphs())
