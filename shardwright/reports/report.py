"""What every report is: paragraphs of text for people, and the same as plain data for programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.pcg.errors import printable


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A title, lines of text, and a table; each may be empty. A column called `>title` is flush right, for numbers."""

    title: str
    lines: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        """Names in a plan file may hold anything; none of it steers a terminal."""
        object.__setattr__(self, "title", printable(self.title))
        object.__setattr__(self, "lines", tuple(map(printable, self.lines)))
        object.__setattr__(self, "rows", tuple(tuple(printable(x, "") for x in row) for row in self.rows))

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {line}" for line in (*self.lines, *self._table()))])

    def _table(self) -> Iterator[str]:
        everything = [[column.removeprefix(">") for column in self.columns], *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*everything, strict=True)]
        aligned = [str.rjust if column.startswith(">") else str.ljust for column in self.columns]
        for row in everything if self.columns else ():
            cells = (align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True))
            yield "  ".join(cells).rstrip()


class Report(ABC):
    """Something that was found out. `str` is plain text; the command line sets the paragraphs in colour."""

    @abstractmethod
    def paragraphs(self) -> Sequence[Paragraph]:
        """For people."""

    @abstractmethod
    def data(self) -> object:
        """For programs: what becomes JSON."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.paragraphs())) + "\n"
