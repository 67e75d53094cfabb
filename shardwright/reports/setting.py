"""Sets text and tables in a given number of terminal columns; nothing is ever cut off.

A table that is too wide loses its bars, then has the cells of its text columns wrapped. If that is not enough, each row
becomes a record: its first cell, and below it the others, each with the title of its column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import NamedTuple

_GAP = 2
_LONGEST_WORD = 24
"""Longer words are broken rather than given a column of their length."""
_MOST_LINES = 3
"""The most lines in a cell."""
_LEAST_VALUE = 16


class Set(NamedTuple):
    """Lines that belong together, and the row of the table that they show; None: the titles of the columns."""

    row: int | None
    lines: list[str]


def wrapped(text: str, width: int | None, hanging: str = "  ") -> list[str]:
    """Return lines of at most `width` characters, later ones indented by `hanging` more. None: the text as it is."""
    if width is None or len(text) <= width:
        return [text]
    lead = text[: len(text) - len(text.lstrip())]
    return wrap(text, width, subsequent_indent=lead + hanging, break_on_hyphens=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[Set]:
    """Yield a table whose columns called `>title` are flush right. `width`: None for as wide as it is."""
    natural = _widths(columns, rows)
    if width is None or _total(natural) <= width:
        yield from _aligned(columns, rows, natural)
        return
    shown = [i for i, column in enumerate(columns) if column or not _is_bar([row[i] for row in rows])]
    columns, rows = [columns[i] for i in shown], [[row[i] for i in shown] for row in rows]
    widths = _narrowed(columns, rows, width)
    yield from _records(columns, rows, width) if widths is None else _aligned(columns, rows, widths)


def _is_bar(cells: Sequence[str]) -> bool:
    return any(cells) and set("".join(cells)) == {"█"}


def _title(column: str) -> str:
    return column.removeprefix(">")


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(map(_title, columns), *rows, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _narrowed(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return widths that fit, with columns of numbers as they are; None where cells would become too high."""
    natural = _widths(columns, rows)
    words = [
        max((len(cell) - len(cell.lstrip()) + len(word) for cell in cells for word in cell.split()), default=0)
        for cells in zip(*rows, strict=True)
    ]
    least = [
        width if column.startswith(">") else min(width, max(len(column), min(word, _LONGEST_WORD)))
        for column, width, word in zip(columns, natural, words, strict=True)
    ]
    spare, wanted = width - _total(least), sum(natural) - sum(least)
    if spare < 0:
        return None
    widths = [
        low + (min(spare, wanted) * (width - low) // wanted if wanted else 0)
        for low, width in zip(least, natural, strict=True)
    ]
    cells = ((cell, width) for row in rows for cell, width in zip(row, widths, strict=True))
    return widths if all(len(wrapped(cell, width, "")) <= _MOST_LINES for cell, width in cells) else None


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[Set]:
    sides = [str.rjust if column.startswith(">") else str.ljust for column in columns]
    for number, row in enumerate([list(map(_title, columns)), *rows]):
        cells = [wrapped(cell, width, "") for cell, width in zip(row, widths, strict=True)]
        lines = [
            (" " * _GAP).join(side(part, width) for side, part, width in zip(sides, parts, widths, strict=True))
            for parts in zip_longest(*cells, fillvalue="")
        ]
        yield Set(number - 1 if number else None, [line.rstrip() for line in lines])


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[Set]:
    titles = list(map(_title, columns))
    label = max(map(len, titles[1:]), default=0)
    for number, (head, *cells) in enumerate(rows):
        lead = " " * (len(head) - len(head.lstrip()) + _GAP)
        lines = wrapped(f"{titles[0]} {head}" if columns[0].startswith(">") else head, width)
        for title, cell in zip(titles[1:], cells, strict=True):
            if cell:
                before = f"{lead}{title:{label}}{' ' * _GAP}"
                hanging = " " * (len(before) - len(lead) if width - len(before) >= _LEAST_VALUE else _GAP)
                lines += wrapped(before + cell, width, hanging)
        yield Set(number, lines)
