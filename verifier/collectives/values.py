"""A cell's contents, as the judge sees them: contributions to one chunk, each once, or something spoiled.

A multiset in which a contribution stands twice cannot become right again by adding, so it need not be counted: it is
spoiled, and says since when. A spoiled cell that nobody needs does no harm.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwright.pcg.collectives.collective import Collective


class Sum(NamedTuple):
    """The contributions of some ranks to a chunk, as bits."""

    chunk: int
    ranks: int

    def __str__(self) -> str:
        return f"chunk {self.chunk} of {ranks_text(self.ranks)}"


class Spoiled(NamedTuple):
    """A value that no collective asks for, and where it came to be."""

    why: str
    twice: bool

    def __str__(self) -> str:
        return self.why


Value = Sum | Spoiled


def added(values: list[Value], where: str) -> Value:
    """Return the sum of values; `where` says which step adds them."""
    total = values[0]
    for value in values[1:]:
        total = _plus(total, value, where)
    return total


def _plus(a: Value, b: Value, where: str) -> Value:
    if isinstance(a, Spoiled) or isinstance(b, Spoiled):
        return a if isinstance(a, Spoiled) else b
    if a.chunk != b.chunk:
        return Spoiled(f"{where} adds chunk {a.chunk} and chunk {b.chunk}", twice=False)
    if a.ranks & b.ranks:
        return Spoiled(f"{where} counts {ranks_text(a.ranks & b.ranks)} twice in chunk {a.chunk}", twice=True)
    return Sum(a.chunk, a.ranks | b.ranks)


def before(collective: Collective) -> dict[tuple[int, int], Sum]:
    """Return what the cells hold before: by rank and chunk."""
    return {cell: Sum(cell[1], bits(ranks)) for cell, ranks in collective.pre.items()}


def afterwards(collective: Collective) -> dict[tuple[int, int], Sum]:
    """Return what the cells must hold afterwards: by rank and chunk."""
    by_cell, sums = dict[tuple[int, int], Sum](), dict[int, Sum]()
    for cell, ranks in collective.post.items():
        if cell[1] not in sums:
            sums[cell[1]] = Sum(cell[1], bits(ranks))
        by_cell[cell] = sums[cell[1]]
    return by_cell


def bits(ranks: frozenset[int]) -> int:
    """Return a set of ranks as the bits of a number."""
    return sum(1 << rank for rank in ranks)


def ranks_text(ranks: int) -> str:
    """Return ranks in words: "rank 3", "ranks 0, 1, 2"; of many only the first."""
    numbers, more = [], ranks
    while more and len(numbers) < 8:
        numbers.append((more & -more).bit_length() - 1)
        more &= more - 1
    text = ", ".join(map(str, numbers)) + (f" and {more.bit_count()} more" if more else "")
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text or 'none'}"
