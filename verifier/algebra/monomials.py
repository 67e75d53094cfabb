"""Normal forms as data: sums of monomials, which are products of powers of interned factors.

A *normal form* is a sum of monomials with rational coefficients; a *monomial* a product of powers of factors:

    cell     an element of a variable                    size     a size, which is at least 1 unless it says otherwise
    sum      Σ over bound indices of a monomial          exp      exp of a normal form
    max      the greatest of a family of normal forms    poly     a normal form of several monomials, in a power
    sqrt     the square root of a normal form, which may not exist, and other functions of normal forms
    in       1 where a position is within [0, n), else 0   ge       1 where an integer is at least 0, else 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shardwright.verifier.algebra.polys import App, Poly

Exponent = int | Fraction
Monomial = tuple[tuple["NormalFactor", Exponent], ...]
Normal = tuple[tuple[Monomial, Fraction], ...]
Bound = tuple[str, Poly]
Payload = Poly | str | Monomial | Normal | tuple["Payload", ...] | App

ZERO: Normal = ()
ONE: Normal = (((), Fraction(1)),)
INDICATORS = ("in", "same", "ge")


@dataclass(frozen=True, eq=False, slots=True)
class NormalFactor:
    """A factor. `names` are the indices on which it depends; the flags hold wherever it exists.

    positive     greater than 0
    nonnegative  at least 0
    total        exists for all tensors
    """

    kind: str
    parts: tuple[Payload, ...]
    number: int
    names: frozenset[str]
    height: int
    positive: bool
    nonnegative: bool
    total: bool

    @property
    def nonzero(self) -> bool:
        """True if the factor may be cancelled: it exists everywhere and is not 0."""
        return self.positive and self.total

    def __str__(self) -> str:
        return f"{self.kind}{self.number}"


def of(f: NormalFactor) -> Normal:
    """Return a factor as a normal form."""
    return ((((f, 1),), Fraction(1)),)


def argument_of(f: NormalFactor) -> Normal:
    """Return the normal form of which a factor is a function."""
    return f.parts[0]  # type: ignore[return-value]


def integral(e: Exponent) -> Exponent:
    """Return a whole exponent as an `int`, any other unchanged."""
    return int(e) if e == int(e) else e


def power_order(power: tuple[NormalFactor, Exponent]) -> tuple[int, Exponent]:
    """Return the key by which the powers of a monomial are sorted."""
    return power[0].number, power[1]


def monomial_order(monomial: Monomial) -> tuple[tuple[int, Exponent], ...]:
    """Return the key by which the monomials of a form are sorted."""
    return tuple(map(power_order, monomial))


def normal_order(normal: Normal) -> tuple[object, ...]:
    """Return the key by which forms are compared."""
    return tuple((monomial_order(m), c) for m, c in normal)


def sorted_normal(items: Iterable[tuple[Monomial, Fraction]]) -> Normal:
    """Return monomials in their canonical order."""
    pairs = list(items)
    return tuple(sorted(pairs, key=lambda item: monomial_order(item[0])) if len(pairs) > 1 else pairs)


def total_monomial(monomial: Monomial) -> bool:
    """Return whether a product exists for all tensors."""
    return all(f.total and (e >= 0 or f.positive) for f, e in monomial)


def nonnegative_power(f: NormalFactor, e: Exponent) -> bool:
    """Return whether a power is at least 0 wherever it exists."""
    return f.nonnegative or e % 2 == 0


def names_of(part: Payload) -> frozenset[str]:
    """Return the indices on which a payload depends."""
    if isinstance(part, Poly):
        return part.indices
    if isinstance(part, str | App):
        return frozenset()
    if isinstance(part, NormalFactor):
        return part.names
    inner: tuple[Any, ...] = part if isinstance(part, tuple) else ()
    return frozenset().union(*map(names_of, inner))


def factors_of(part: object) -> Iterator[NormalFactor]:
    """Yield the factors of a payload, without those inside other factors."""
    if isinstance(part, NormalFactor):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from factors_of(inner)


def total_normal(normal: Normal) -> bool:
    """Return whether a sum exists for all tensors."""
    return all(total_monomial(m) for m, _ in normal)
