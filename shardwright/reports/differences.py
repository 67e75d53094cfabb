"""The differences between two folds of the tree, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from shardwright.reports.tree import Module, ModuleRow
from shardwright.reports.units import seconds, shape

Pair = tuple[str, ModuleRow, ModuleRow]
"""A row's place in the tree, and the two rows that stand there."""


def differences(module: Module, first: Module) -> str:
    """Return the differences: `made again in backward; other layouts (mlp.up weight: y=S(0), not y=R, and 4 more)`."""
    pairs = list(_pairs(module, first, ""))
    if any(mine is None or other is None for _, mine, other in pairs):
        return "other operators"
    rows: list[Pair] = [(name, mine, other) for name, mine, other in pairs if mine is not None and other is not None]
    return "; ".join(filter(None, (aspect(rows) for aspect in _ASPECTS))) or _slower(rows)


def _pairs(one: Module, other: Module, at: str) -> Iterator[tuple[str, ModuleRow | None, ModuleRow | None]]:
    """Yield rows at the same place; None where there is none, or one of another name."""
    for mine, its in zip_longest(one.rows, other.rows):
        alike = mine and its and (mine.kind, mine.name) == (its.kind, its.name)
        yield (f"{at}{mine.name}", mine, its) if alike else (at, mine, None)
    for child, its_child in zip_longest(one.children, other.children):
        if child is None or its_child is None or len(child.members) != len(its_child.members):
            yield at, None, None
        else:
            yield from _pairs(child, its_child, f"{at}{child.label}.")


def _again(rows: Sequence[Pair]) -> str:
    ways = {mine.again for _, mine, its in rows if mine.again != its.again}
    if len(ways) == 2:
        return "other operators made again in backward"
    if not ways:
        return ""
    some = any(mine.again and its.again for _, mine, its in rows)
    return ("more " * some if ways == {True} else "less " if some else "not ") + "made again in backward"


def _aspect(title: str, of: Callable[[ModuleRow], str]) -> Callable[[Sequence[Pair]], str]:
    """Return a function that describes the first pair of rows that differ in an aspect, or returns ""."""

    def said(rows: Sequence[Pair]) -> str:
        different = [(name, of(mine), of(its)) for name, mine, its in rows if of(mine) != of(its)]
        if not different:
            return ""
        name, mine, its = different[0]
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        return f"other {title} ({name}: {mine or 'none'}, not {its or 'none'}{more})"

    return said


_ASPECTS = (
    _again,
    _aspect("sizes", lambda row: f"{row.dtype} {shape(row.shape)}"),
    _aspect("layouts", lambda row: ", ".join(row.layouts)),
    _aspect("lifetimes", lambda row: row.lifetime),
    _aspect("communication", lambda row: ", ".join(f"{s.axis}: {s.before} → {s.after}" for s in row.steps)),
)


def _slower(rows: Sequence[Pair]) -> str:
    own_s, its_s = (sum(row.compute_s + sum(s.seconds for s in row.steps) for row in side)
                    for side in ([mine for _, mine, _ in rows], [its for _, _, its in rows]))  # fmt: skip
    return "other lines of the source" if own_s == its_s else f"{seconds(own_s)} each, not {seconds(its_s)}"
