"""The choices there are: the closed set of their kinds, the offers of an operator's row, and choices from text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from shardwright.pcg.choice import COPIED, WHOLE, Choice, Choices, Partial, Split, Whole
from shardwright.pcg.dispatch import Sent
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import Layout, Layouts
from shardwright.pcg.ring import Ring
from shardwright.pcg.row import Row

KINDS: tuple[type[Choice], ...] = (Whole, Partial, Sent, Ring, Split)
"""The kinds of choice; nothing else carries an operator out."""
EXCHANGES = {kind.exchange.what: kind.exchange for kind in KINDS if kind.exchange is not None}
"""The exchanges between devices while an operator runs, by their name in reports."""


def parse_choice(text: str) -> Choice:
    """Return the choice that prints as `text`. Any text is one: text that no kind prints is a factor of that name."""
    parsed = (kind.read(text) for kind in KINDS)
    return next((choice for choice in parsed if choice is not None and choice == text), Split(text))


def parse_choices(texts: Iterable[str]) -> Choices:
    """Return the choices that print as these texts."""
    return tuple(map(parse_choice, texts))


def alone(row: Row, factors: Iterable[str]) -> Choices:
    """Return the choices of a row, for an operator with these factors, under which each device works by itself."""
    return (WHOLE, COPIED, *map(Partial, row.linear_in), *map(Split, factors))


def sending(row: Row, signature: Signature) -> Choices:
    """Return the choices of a row under which devices send each other something."""
    return tuple(choice for kind in KINDS for choice in kind.offered(row, signature))


def offered(
    row: Row, signature: Signature, blocks: Callable[[int], Iterable[int]]
) -> Iterator[tuple[Choice, Layouts, Layout]]:
    """Yield every way to run an operator along one axis by itself: choice, operands' layouts, result's layout.

    Factors come whole, then split within each number of equal blocks that `blocks` has for their size. One whose
    positions count has no blocks here, as the number of devices says which numbers it can have.
    """
    factors = [f for f in signature.factors if f.role != "fixed" and f.size > 1]
    counts = ((f, n) for f in factors for n in blocks(f.size) if 1 < n < f.size and f.size % n == 0)
    blocked = (Split(f.name, n) for f, n in counts if f.name != row.offset)
    for choice in (*alone(row, [f.name for f in factors]), *blocked):
        with suppress(LayoutError):
            yield choice, *choice.layouts(signature, row)
