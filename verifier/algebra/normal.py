"""Normal forms: a tensor's element as a sum of products, so that equal elements are equal objects.

    linear(add(x, y), w)[b, o]  =  Σ_i x[b, i]·w[o, i]  +  Σ_i y[b, i]·w[o, i]

Factors are interned: equal values are one object, whatever the names of their bound indices. Products of sums are
multiplied out. Exponents of one factor are added, but `x · 1/x` is cancelled only if x is known to be nonzero and to
exist everywhere: see `NormalFactor.nonzero` and `total`. A monomial that cancels to 0 is kept, with coefficient 0,
unless it is total. So both sides of a rule exist for the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from itertools import count, product

from shardwright.verifier.algebra.monomials import (
    INDICATORS,
    ONE,
    ZERO,
    Bound,
    Exponent,
    Monomial,
    Normal,
    NormalFactor,
    Payload,
    argument_of,
    factors_of,
    integral,
    names_of,
    of,
    power_order,
    sorted_normal,
    total_normal,
)
from shardwright.verifier.algebra.polys import Atom, Poly, applied, poly


@dataclass
class Forms:
    """The factors of one proof.

    is_size     returns whether a name or an application is at least 1
    in_range    (condition, function, n): where the condition on a value is 1, the value is in [0, n)
    exists      True if the term of the forms has a value, so that cancelled factors are not 0 and exist
    known       factors that are not 0 and exist, because the other side divides by them
    used        the laws that were applied, by their names in verifier/algebra/lawbook.py
    """

    is_size: Callable[[Atom], bool] = lambda atom: isinstance(atom, str)
    in_range: set[tuple[str, str, Poly]] = field(default_factory=set)
    exists: bool = False
    known: frozenset[NormalFactor] = frozenset()
    used: set[str] = field(default_factory=set)
    _made: dict[tuple[object, ...], NormalFactor] = field(default_factory=dict)
    _renamed: dict[tuple[NormalFactor, tuple[Bound, ...]], Normal] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=count)

    # ---- factors ----

    def factor(
        self,
        kind: str,
        *parts: Payload,
        positive: bool = False,
        nonnegative: bool = False,
        total: bool = True,
        height: int = 0,
        names: frozenset[str] | None = None,
    ) -> NormalFactor:
        """Return the one factor of this kind and these parts."""
        key = (kind, parts)
        if key not in self._made:
            seen = frozenset().union(*map(names_of, parts)) if names is None else names
            inner = max((f.height for part in parts for f in factors_of(part)), default=0)
            self._made[key] = NormalFactor(
                kind, parts, len(self._made), seen, max(height, inner), positive, positive or nonnegative, total
            )
        return self._made[key]

    def fresh(self) -> str:
        """Return a new bound index."""
        return f"~{next(self._fresh)}"

    def cell(self, variable: str, index: Sequence[Poly]) -> Normal:
        """Return an element of a variable."""
        return of(self.factor("cell", variable, tuple(index)))

    def number(self, value: Fraction | int) -> Normal:
        return (((), Fraction(value)),) if value else ZERO

    def size(self, value: Poly) -> Normal:
        """Return a size as a form: its names are factors, which are positive if they are sizes."""
        return self.add(*(self.product(self.number(c), *map(self._size, atoms)) for atoms, c in value.terms))

    def _size(self, atom: Atom) -> Normal:
        return of(self.factor("size", poly(atom), positive=self.is_size(atom)))

    def indicator(self, kind: str, *parts: Poly) -> Normal:
        """Return the form that is 1 where a condition on positions holds, else 0."""
        return of(self.factor(kind, *parts, nonnegative=True))

    # ---- sums and products ----

    def add(self, *normals: Normal) -> Normal:
        """Return the sum, with equal monomials collected."""
        total: dict[Monomial, Fraction] = {}
        for normal in normals:
            for monomial, coefficient in normal:
                total[monomial] = total.get(monomial, Fraction(0)) + coefficient
        nonzero = [(m, c) for m, c in total.items() if c or not self._surely(m)]
        ordered = sorted_normal(nonzero)
        if len(total) > 1 or len(normals) > 1:
            self._note_sum(sum(map(len, normals)), len(total), nonzero, ordered)
        return ordered

    def _note_sum(self, given: int, distinct: int, nonzero: Sequence[object], ordered: Sequence[object]) -> None:
        if given > distinct:
            self.used.add("collect")
        if given > 2:
            self.used.add("add-associates")
        if any(a is not b for a, b in zip(nonzero, ordered, strict=True)):
            self.used.add("add-commutes")

    def scaled(self, normal: Normal, by: Fraction | int) -> Normal:
        if not by:
            return sorted_normal((m, Fraction(0)) for m, _ in normal if not self._surely(m))
        self.noted(by != 1 and any(c != 1 for _, c in normal), "mul-associates")
        return tuple((m, c * by) for m, c in normal)

    def times(self, left: Normal, right: Normal) -> Normal:
        """Return the product, multiplied out."""
        if left == ONE:
            return right
        if right == ONE:
            return left
        if not left or not right:  # 0 · u exists where u does
            return self.scaled(left or right, 0)
        parts = [self.scaled(self.monomial((*a, *b)), c * d) for (a, c), (b, d) in product(left, right)]
        if len(parts) == 1:
            return parts[0]
        self.used.add("distribute")
        return self.add(*parts)

    def product(self, *normals: Normal) -> Normal:
        """Return the product of several forms, multiplied out."""
        return reduce(self.times, normals, ONE)

    def monomial(self, factors: Iterable[tuple[NormalFactor, Exponent]]) -> Normal:
        """Return a product of powers, with exponents added, and with powers written out where possible."""
        powers: dict[tuple[NormalFactor, bool], Exponent] = {}
        exponents: list[Normal] = []
        for f, e in factors:
            if f.kind == "exp":
                exponents.append(self.scaled(argument_of(f), Fraction(e)))
                self.noted(e != 1, "exp-of-multiple")
            else:
                key = (f, not self._cancels(f) and e < 0)
                if key in powers:
                    self._note_powers(f, powers[key], e)
                powers[key] = powers.get(key, 0) + e
        written: list[Normal] = []
        nontrivial: list[tuple[NormalFactor, Exponent]] = []
        if exponents:
            self.noted(len(exponents) > 1, "exp")
            ones = {f for f, _ in powers if f.kind in INDICATORS}
            argument = self._where(ones, self.add(*exponents))
            nontrivial += [(self.exponential(argument), 1)] if argument else []
        for (f, _), e in powers.items():
            if f.kind == "in" and self._implied(f, powers):
                self.used.add("indices-in-range")
                continue
            if (power := self._written_out(f, e)) is not None:
                written.append(power)
            elif e:
                squared = f.kind in INDICATORS and e > 1
                self.noted(squared, "indicator-squared")
                nontrivial.append((f, 1 if squared else integral(e)))
        ordered = sorted(nontrivial, key=power_order)
        self.noted(len(nontrivial) > 2, "mul-associates")
        self.noted(ordered != nontrivial, "mul-commutes")
        return self.product(((tuple(ordered), Fraction(1)),), *written)

    def noted(self, applied: bool, *laws: str) -> bool:
        """Record the laws if they were applied, and return whether they were."""
        if applied:
            self.used.update(laws)
        return applied

    def _note_powers(self, f: NormalFactor, one: Exponent, other: Exponent) -> None:
        """Record the laws by which two powers of one factor are multiplied."""
        if one != int(one) or other != int(other):
            self.used.add("sqrt")
        if (one > 0) == (other > 0):
            self.used.add("powers")
        else:
            self.used.add("cancel-factor")
            self.noted(f.kind == "sum" and f.positive, "positive-sum")

    def _written_out(self, f: NormalFactor, e: Exponent) -> Normal | None:
        """Write a power in other factors, or return None: of a sum, |u|², relu(u)² = u·relu(u), an existing √u·√u."""
        if e < 1 or e != int(e):
            return None
        if f.kind == "poly":
            self.noted(e > 1, "powers")
            return self.to_the(argument_of(f), int(e))
        if f.kind == "abs" and e >= 2:
            self.used.add("abs-squared")
            square = self.to_the(argument_of(f), int(e) - int(e) % 2)
            return self.times(square, of(f) if e % 2 else ONE)
        if f.kind == "sqrt" and self.exists and e == 2:
            self.used.add("sqrt")
            return argument_of(f)
        if f.kind == "fn relu" and e >= 2:
            self.used.add("relu-squared")
            return self.times(of(f), self.to_the(argument_of(f), int(e) - 1))
        return None

    def _cancels(self, f: NormalFactor) -> bool:
        return self.exists or f.nonzero or f in self.known

    def _surely(self, monomial: Monomial) -> bool:
        """Return whether a product exists, for all tensors or because the other side exists."""
        return self.exists or all((f.total and (e >= 0 or f.positive)) or f in self.known for f, e in monomial)

    def assume(self, normal: Normal) -> None:
        """Assume that a form exists: its divisors are not 0, unless an indicator masks them.

        Facts that hold for all bound indices are not used.
        """
        read = [m for m, _ in normal if not any(f.kind in INDICATORS for f, _ in m)]
        self.known = frozenset(f for m in read for f, e in m if e < 0)
        self._renamed.clear()

    def _implied(self, inside: NormalFactor, others: Iterable[tuple[NormalFactor, bool]]) -> bool:
        """Return whether another indicator of the product implies that the value is within its range."""
        if not self.in_range:
            return False
        value, size = inside.parts
        conditions = (applied(f.parts[0]) for f, _ in others if f.kind == "same")  # type: ignore[arg-type]
        bound = applied(value)  # type: ignore[arg-type]
        return bound is not None and any(
            c is not None and c.args == (value,) and (c.name, bound.name, size) in self.in_range for c in conditions
        )

    def _where(self, ones: set[NormalFactor], normal: Normal) -> Normal:
        """Return the form where these indicators are 1: c·exp(u) depends on u only there."""
        if not any(f in ones for m, _ in normal for f, _ in m):
            return normal
        self.used.add("indicator-masks")
        parts = (((tuple((f, e) for f, e in m if f not in ones), c),) for m, c in normal)
        return self.add(*parts)

    def exponential(self, argument: Normal) -> NormalFactor:
        return self.factor("exp", argument, positive=True, total=total_normal(argument))

    def to_the(self, normal: Normal, exponent: int) -> Normal:
        """Return a power with an exponent of 0 or more."""
        return self.product(*[normal] * exponent)
