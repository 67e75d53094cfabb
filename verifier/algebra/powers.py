"""Rational powers of normal forms, and the signs of forms.

"Positive" is read off the form: exponentials, sizes, their sums and products, and powers of these, if defined
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from shardwright.pcg.errors import RuleError
from shardwright.verifier.algebra.families import Families
from shardwright.verifier.algebra.monomials import (
    ZERO,
    Exponent,
    Monomial,
    Normal,
    NormalFactor,
    argument_of,
    of,
    total_normal,
)

HALF = Fraction(1, 2)


def positive_normal(normal: Normal) -> bool:
    """Return whether a form is greater than 0 wherever it exists: its terms are nonnegative, and one is positive."""
    return nonnegative_normal(normal) and any(c > 0 and all(f.positive for f, _ in m) for m, c in normal)


def nonnegative_normal(normal: Normal) -> bool:
    """Return whether a form is at least 0 wherever it exists."""
    return all(_nonnegative_term(m, c) for m, c in normal)


def _nonnegative_term(monomial: Monomial, coefficient: Fraction) -> bool:
    """Return whether a term is at least 0 because its factors are, or as relu(u)·v with a u·v that is."""
    if coefficient >= 0 and all(f.nonnegative or e % 2 == 0 for f, e in monomial):
        return True
    for f, e in monomial:
        if f.kind == "fn relu" and e == 1 and len(argument := argument_of(f)) == 1 and argument[0][1]:
            powers = dict(monomial)
            del powers[f]
            for g, power in argument[0][0]:
                powers[g] = powers.get(g, 0) + power
            if coefficient * argument[0][1] >= 0 and all(g.nonnegative or p % 2 == 0 for g, p in powers.items()):
                return True
    return False


@dataclass
class PowerLaws(Families):
    """Normal forms with rational powers."""

    # ---- powers ----

    def raised(self, normal: Normal, exponent: Exponent) -> Normal:
        """Return a rational power."""
        if exponent == int(exponent) and exponent >= 0:
            return self.to_the(normal, int(exponent))
        if len(normal) == 1 and normal[0][1]:
            return self._monomial_raised(*normal[0], exponent)
        pulled, coefficient, rest = self._content(normal, free=exponent == int(exponent))
        product = "reciprocal-of-product" if exponent == int(exponent) else "root-of-product"
        self.noted(bool(pulled) or coefficient != 1, product, "distribute")
        before = self.times(self.monomial((f, e * exponent) for f, e in pulled), self._number(coefficient, exponent))
        return self.times(before, self._opaque_power(rest, exponent))

    def reciprocal(self, normal: Normal) -> Normal:
        return self.raised(normal, -1)

    def sqrt(self, normal: Normal) -> Normal:
        return self.raised(normal, HALF)

    def rsqrt(self, normal: Normal) -> Normal:
        return self.raised(normal, -HALF)

    def _opaque_power(self, base: Normal, e: Exponent) -> Normal:
        """Return a power of a form that is not a product. If it may be negative, its root is a separate function."""
        positive, total = positive_normal(base), total_normal(base)
        if e == int(e) or (positive and total):
            return self.monomial([(self.factor("poly", base, positive=positive, total=total), e)])
        root = self.factor("sqrt", base, nonnegative=True, positive=positive, total=positive and total)  # at 0 no slope
        if (e * 2) != int(e * 2):
            raise RuleError(f"the power {e} of a form that may be negative")
        return ((((root, int(e * 2)),), Fraction(1)),)

    def _monomial_raised(self, monomial: Monomial, coefficient: Fraction, e: Exponent) -> Normal:
        if e == int(e):
            if any(not self._cancels(f) and power < 0 for f, power in monomial):
                return self._opaque_power(((monomial, coefficient),), e)
            self.noted(e < 0 and (len(monomial) > 1 or coefficient != 1), "reciprocal-of-product")
            self.noted(e < 0 and any(power < 0 for _, power in monomial), "reciprocal-of-reciprocal")
            return self.scaled(self.monomial((f, power * e) for f, power in monomial), coefficient ** int(e))
        known, rest = split_signs(monomial)
        sign = 1 if coefficient > 0 else -1
        self.noted(len(known) + bool(rest) > 1 or (abs(coefficient) != 1 and bool(monomial)), "root-of-product")
        self.noted(any(power % 2 == 0 for _, power in known), "root-of-square")
        raised = self.times(self.monomial((f, power * e) for f, power in known), self._number(abs(coefficient), e))
        if not rest and sign > 0:
            return raised
        if sign > 0 and (e * 2) == int(e * 2) and all(p > 0 and p % 2 == 0 for _, p in rest):
            self.used.add("root-of-square")
            return self.product(raised, *(self.raised(self.absolute_factor(f), p * e) for f, p in rest))
        return self.times(raised, self._opaque_power(((rest, Fraction(sign)),), e))

    def absolute_factor(self, f: NormalFactor) -> Normal:
        """Return |f|."""
        if self.noted(f.nonnegative, "abs-of-nonnegative"):
            return of(f)
        return of(self.factor("abs", of(f), nonnegative=True, total=f.total))

    def _number(self, value: Fraction, e: Exponent) -> Normal:
        """Return a power of a number, which must be positive if e is not an integer."""
        if e == int(e):
            return self.number(value ** int(e))
        root = _square_root(value)
        if root is not None and e * 2 == int(e * 2):
            return self.number(root ** int(e * 2))
        return self.monomial([(self.factor("poly", self.number(value), positive=True), e)])

    def _content(self, normal: Normal, free: bool) -> tuple[Monomial, Fraction, Normal]:
        """Return the powers and the number that all monomials share, and the rest. `free`: the number has any sign.

        A positive factor is extracted to its least exponent, which clears denominators. A factor that may be 0 stays:
        x·y + x·z = x·(y + z) is expanded the same way on both sides.
        """
        shared = [
            (f, low)
            for f in dict.fromkeys(f for m, _ in normal for f, _ in m)
            if f.nonzero and f.kind not in ("exp", "poly") and (low := min(dict(m).get(f, 0) for m, _ in normal))
        ]
        common = self._common_exponent(normal)
        powers = (*shared, *([(self.exponential(common), 1)] if common else []))
        rest = self.times(normal, self.monomial((f, -e) for f, e in powers)) if powers else normal
        leading = next((c for _, c in rest if c), Fraction(1))
        coefficient = leading if free else abs(leading)
        return powers, coefficient, self.scaled(rest, 1 / coefficient)

    def _common_exponent(self, normal: Normal) -> Normal:
        """Return the terms that the exponents of all monomials share."""
        arguments = [next((argument_of(f) for f, _ in m if f.kind == "exp"), ZERO) for m, _ in normal]
        if len(arguments) < 2:
            return ZERO
        common = set(arguments[0]).intersection(*arguments[1:])
        return self.add(*(((m, c),) for m, c in common if c))


def split_signs(monomial: Monomial) -> tuple[Monomial, Monomial]:
    """Return the powers that are known to be positive, and the others."""
    known = tuple((f, e) for f, e in monomial if f.positive)
    return known, tuple((f, e) for f, e in monomial if not f.positive)


def _square_root(value: Fraction) -> Fraction | None:
    top, bottom = isqrt(value.numerator), isqrt(value.denominator)
    return Fraction(top, bottom) if top * top == value.numerator and bottom * bottom == value.denominator else None
