"""Integer polynomials: sizes, positions and bounds as proofs compute with them, without Z3.

A polynomial is a sum of products of names and of opaque applications: `s + i`, `2·h·d`, `at(p, j)`, `ids[y]`. Equal
polynomials have equal values as objects. Others may still be equal under a rule's guard, which Z3 decides. Names of
indices begin with one of `@~#` (free, bound, bound in a closed form); all other names are sizes and attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class App:
    """An integer function of polynomials, opaque to proofs except for the laws of its name."""

    name: str
    args: tuple[Poly, ...]

    @cached_property
    def text(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"

    def __str__(self) -> str:
        return self.text


Atom = str | App
Product = tuple[Atom, ...]
INDEX = ("@", "~", "#")


@dataclass(frozen=True)
class Poly:
    """A polynomial Σ coefficient · Π atoms, in canonical order."""

    terms: tuple[tuple[Product, int], ...] = ()

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in the polynomial, including those inside applications."""
        names: set[str] = set()
        for atoms, _ in self.terms:
            for atom in atoms:
                names.update({atom} if isinstance(atom, str) else set().union(*(p.names for p in atom.args)))
        return frozenset(names)

    @cached_property
    def indices(self) -> frozenset[str]:
        """The names of indices in the polynomial."""
        return frozenset(name for name in self.names if name[0] in INDEX)

    @property
    def constant(self) -> int | None:
        """The value of a polynomial without names; None for others."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def name(self) -> str | None:
        """The name that this polynomial consists of; None for others."""
        if len(self.terms) != 1 or self.terms[0][1] != 1 or len(self.terms[0][0]) != 1:
            return None
        return atom if isinstance(atom := self.terms[0][0][0], str) else None

    def __add__(self, other: Poly | int) -> Poly:
        return collect((*self.terms, *poly(other).terms))

    def __sub__(self, other: Poly | int) -> Poly:
        return collect((*self.terms, *((atoms, -c) for atoms, c in poly(other).terms)))

    def __mul__(self, other: Poly | int) -> Poly:
        return collect((a + b, c * d) for a, c in self.terms for b, d in poly(other).terms)

    def put(self, images: Mapping[str, Poly]) -> Poly:
        """Return the polynomial with names replaced by polynomials, all at once."""
        if self.names.isdisjoint(images):
            return self
        return sum((product(_put(atom, images) for atom in atoms) * c for atoms, c in self.terms), ZERO)

    def over(self, divisor: Poly) -> Poly | None:
        """Return the quotient by a product of names and a number if it is exact in every term, else None."""
        if len(divisor.terms) != 1 or any(c % divisor.terms[0][1] for _, c in self.terms):
            return None
        terms: list[tuple[Product, int]] = []
        for atoms, coefficient in self.terms:
            left = list(atoms)
            for atom in divisor.terms[0][0]:
                if atom not in left:
                    return None
                left.remove(atom)
            terms.append((tuple(left), coefficient // divisor.terms[0][1]))
        return collect(terms)

    def __str__(self) -> str:
        parts = ["*".join([*([str(c)] if c != 1 or not atoms else []), *map(str, atoms)]) for atoms, c in self.terms]
        return " + ".join(parts) or "0"


def collect(terms: Iterable[tuple[Product, int]]) -> Poly:
    """Return a polynomial from terms in any order."""
    total: dict[Product, int] = {}
    for atoms, coefficient in terms:
        key = tuple(sorted(atoms, key=str)) if len(atoms) > 1 else atoms
        total[key] = total.get(key, 0) + coefficient
    nonzero = [(atoms, c) for atoms, c in total.items() if c]
    return Poly(tuple(sorted(nonzero, key=_order) if len(nonzero) > 1 else nonzero))


def _order(term: tuple[Product, int]) -> tuple[str, ...]:
    return tuple(map(str, term[0]))


def poly(value: Poly | int | Atom) -> Poly:
    """Return a number, a name or an application as a polynomial."""
    if isinstance(value, Poly):
        return value
    if isinstance(value, str | App):
        return Poly((((value,), 1),))
    return Poly((((), value),)) if value else ZERO


def _put(atom: Atom, images: Mapping[str, Poly]) -> Poly:
    if isinstance(atom, str):
        return images[atom] if atom in images else poly(atom)
    return app(atom.name, *(arg.put(images) for arg in atom.args))


ZERO = Poly()
ONE = Poly((((), 1),))


def app(name: str, *args: Poly) -> Poly:
    """Return an application, simplified by the laws of its name."""
    law = LAWS.get(name)
    simplified = law(*args) if law else None
    return poly(App(name, args)) if simplified is None else simplified


def product(factors: Iterable[Poly]) -> Poly:
    """Return the product of polynomials."""
    return prod(factors, start=ONE)


def applied(value: Poly) -> App | None:
    """Return the application that a polynomial consists of, or None."""
    if len(value.terms) == 1 and value.terms[0][1] == 1 and len(value.terms[0][0]) == 1:
        atom = value.terms[0][0][0]
        return atom if isinstance(atom, App) else None
    return None


def _applied(value: Poly, name: str) -> tuple[Poly, ...] | None:
    """Return the arguments of a polynomial that is one application of this name, or None."""
    atom = applied(value)
    return atom.args if atom is not None and atom.name == name else None


def _at(permutation: Poly, index: Poly) -> Poly | None:
    """Apply at(iota, j) = j and at(compose(p, q), j) = at(p, at(q, j))."""
    if permutation.name == "iota":
        return index
    composed = _applied(permutation, "compose")
    return app("at", composed[0], app("at", composed[1], index)) if composed else None


def composed(permutation: Poly) -> list[str]:
    """Return the permutations of which one is composed, in order; none for the identity."""
    parts = _applied(permutation, "compose")
    if parts:
        return [name for part in parts for name in composed(part)]
    return [] if permutation.name == "iota" else [str(permutation)]


def _undoes(other: str) -> Callable[[Poly, Poly], Poly | None]:
    """Return the law by which a function undoes the `other`: flat(s, unflat(s, n)) = n, unflat(s, flat(s, j)) = j."""

    def law(shape: Poly, value: Poly) -> Poly | None:
        inner = _applied(value, other)
        return inner[1] if inner and inner[0] == shape else None

    return law


def _max0(value: Poly) -> Poly | None:
    number = value.constant
    return None if number is None else poly(max(number, 0))


LAWS: Mapping[str, Callable[..., Poly | None]] = {
    "at": _at, "flat": _undoes("unflat"), "unflat": _undoes("flat"), "max0": _max0,
}  # fmt: skip
"""The assumed laws of permutations, of row-major order, and of the length of a slice."""
