"""Bounds of values that are made of the positions of queries and keys.

Integers are bounded by a form a·q + b·k + c of the positions q of a query and k of a key, with a range of c. Truth
values are bounded by the differences k - q at which they can hold, and numbers by those at which they can be more than
-inf. The bounds are sound for any operands: what is not known is not bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, inf
from typing import NamedTuple

from shardwright.pcg.attrs import Attrs
from shardwright.pcg.types import is_float

INTEGERS = ("int32", "int64")
"""Dtypes in which positions do not overflow."""


class Band(NamedTuple):
    """The differences k - q between the positions of a key and of a query, from `first` to `last`; none if less."""

    first: float = -inf
    last: float = inf

    def __and__(self, other: Band) -> Band:
        return Band(max(self.first, other.first), min(self.last, other.last))

    def __or__(self, other: Band) -> Band:
        """Return the smallest band that has both."""
        if self.is_empty or other.is_empty:
            return other if self.is_empty else self
        return Band(min(self.first, other.first), max(self.last, other.last))

    @property
    def is_empty(self) -> bool:
        return self.first > self.last


ALL, NONE = Band(), Band(inf, -inf)


class Affine(NamedTuple):
    """Integers queries · q + keys · k + c, with c from `least` to `most`."""

    queries: Fraction
    keys: Fraction
    least: Fraction
    most: Fraction

    @property
    def is_constant(self) -> bool:
        return not self.queries and not self.keys and self.least == self.most

    def __add__(self, other: object) -> Affine:
        assert isinstance(other, Affine)
        return Affine(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, factor: object) -> Affine:
        assert isinstance(factor, Fraction)
        ends = sorted((self.least * factor, self.most * factor))
        return Affine(self.queries * factor, self.keys * factor, *ends)

    def __sub__(self, other: Affine) -> Affine:
        return self + other * Fraction(-1)

    def at_least(self, bound: int) -> Band:
        """Return where it can be so much."""
        slope, missing = self.keys, bound - self.most
        if self.queries != -slope:
            return ALL
        if not slope:
            return ALL if missing <= 0 else NONE
        return Band(first=ceil(missing / slope)) if slope > 0 else Band(last=floor(missing / slope))


class Truth(NamedTuple):
    """A truth value over a region: the band where it can be true, and the band where it can be false."""

    true: Band
    false: Band

    def __invert__(self) -> Truth:
        return Truth(self.false, self.true)

    def __and__(self, other: Truth) -> Truth:
        return Truth(self.true & other.true, self.false | other.false)

    def __or__(self, other: Truth) -> Truth:
        return ~(~self & ~other)


class Size(NamedTuple):
    """The absolute value of integers."""

    of: Affine


Bound = Affine | Size | Truth | Band
"""Of integers; of absolute values of these; of truth values; of numbers, where they can be more than -inf."""


def constant(attrs: Attrs, dtype: str) -> Bound | None:
    """Return the bound of a constant, which the attribute `value` gives."""
    value = attrs["value"]
    if dtype == "bool":
        return Truth(ALL, NONE) if value else Truth(NONE, ALL)
    assert isinstance(value, int | float)
    if is_float(dtype):
        return NONE if value == -inf else ALL
    if dtype not in INTEGERS:
        return None
    return Affine(Fraction(0), Fraction(0), Fraction(value), Fraction(value))


def _difference(operands: Sequence[Bound | None]) -> Affine | None:
    x, y = operands
    return x - y if isinstance(x, Affine) and isinstance(y, Affine) else None


def _compared(operands: Sequence[Bound | None], bound: int, sign: int = 1) -> Truth | None:
    """Return the bound of sign · (x - y) ≥ bound.

    |x| is the larger one of x and -x: it is so much if one of them is, and no more if both are not.
    """
    for place, operand in enumerate(operands):
        if isinstance(operand, Size):
            signed = (operand.of, operand.of * Fraction(-1))
            a, b = (_compared([*operands[:place], x, *operands[place + 1 :]], bound, sign) for x in signed)
            if a is None or b is None:
                return None
            return a & b if (place == 1) == (sign > 0) else a | b
    if (difference := _difference(operands)) is None:
        return None
    scaled = difference * Fraction(sign)
    return Truth(scaled.at_least(bound), (scaled * Fraction(-1)).at_least(1 - bound))


def _equal(operands: Sequence[Bound | None]) -> Truth | None:
    if (difference := _difference(operands)) is None:
        return None
    return Truth(difference.at_least(0) & (difference * Fraction(-1)).at_least(0), ALL)


def _unequal(operands: Sequence[Bound | None]) -> Truth | None:
    return None if (equal := _equal(operands)) is None else ~equal


def _truths(operands: Sequence[Bound | None]) -> list[Truth]:
    return [x if isinstance(x, Truth) else Truth(ALL, ALL) for x in operands]


def _both(operands: Sequence[Bound | None]) -> Truth:
    x, y = _truths(operands)
    return x & y


def _either(operands: Sequence[Bound | None]) -> Truth:
    x, y = _truths(operands)
    return x | y


def _other(operands: Sequence[Bound | None]) -> Truth:
    (x,) = _truths(operands)
    return ~x


def _where(operands: Sequence[Bound | None]) -> Bound | None:
    """Return the bound of a choice between truth values, or between numbers of which some are -inf."""
    condition, x, y = operands
    (c,) = _truths([condition])
    if isinstance(x, Truth) or isinstance(y, Truth):
        a, b = _truths([x, y])
        return Truth((c.true & a.true) | (c.false & b.true), (c.true & a.false) | (c.false & b.false))
    if isinstance(x, Band) or isinstance(y, Band):
        a, b = (operand if isinstance(operand, Band) else ALL for operand in (x, y))
        return (c.true & a) | (c.false & b)
    return None


def _sum(operands: Sequence[Bound | None]) -> Affine | None:
    x, y = operands
    return x + y if isinstance(x, Affine) and isinstance(y, Affine) else None


def _absolute(operands: Sequence[Bound | None]) -> Size | None:
    (x,) = operands
    return Size(x) if isinstance(x, Affine) else None


def _product(operands: Sequence[Bound | None]) -> Affine | None:
    for x, y in (operands, operands[::-1]):
        if isinstance(x, Affine) and isinstance(y, Affine) and y.is_constant:
            return x * y.least
    return None


def _quotient(operands: Sequence[Bound | None]) -> Affine | None:
    """Return the bound of ⌊x / d⌋, which is at most (d - 1) / d less than x / d."""
    x, y = operands
    if not isinstance(x, Affine) or not isinstance(y, Affine) or not y.is_constant or y.least <= 0:
        return None
    exact = x * (1 / y.least)
    return exact._replace(least=exact.least - (y.least - 1) / y.least)


POINTWISE: Mapping[str, Callable[[Sequence[Bound | None]], Bound | None]] = {
    "add": _sum, "sub": _difference, "mul": _product, "floor_divide": _quotient, "abs": _absolute,
    "ge": lambda x: _compared(x, 0), "gt": lambda x: _compared(x, 1),
    "le": lambda x: _compared(x, 0, -1), "lt": lambda x: _compared(x, 1, -1), "eq": _equal, "ne": _unequal,
    "bitwise_and": _both, "bitwise_or": _either, "logical_not": _other, "where": _where,
}  # fmt: skip
