"""Text in sections: a title, lines, and a table. `str` is plain text; the command line sets them in colour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Columns are (title, whether its cells are numbers and flush right)."""

    columns: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> Iterator[str]:
        """Plain text, a header line first."""
        everything = [tuple(title for title, _ in self.columns), *self.rows]
        widths = [max(len(row[i]) for row in everything) for i in range(len(self.columns))]
        for row in everything:
            cells = (
                c.rjust(w) if right else c.ljust(w) for c, w, (_, right) in zip(row, widths, self.columns, strict=True)
            )
            yield "  ".join(cells).rstrip()


@dataclass(frozen=True, slots=True)
class Section:
    """A title, lines of text, and a table; each may be empty."""

    title: str
    lines: tuple[str, ...] = ()
    table: Table | None = None

    def __str__(self) -> str:
        body = [*self.lines, *(self.table.lines() if self.table else ())]
        return "\n".join([self.title, *(f"  {line}" for line in body)])


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` has to say."""

    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.sections)) + "\n"
