"""The laws of functions over the reals that normal forms use.

    exp(u + v) = exp u · exp v      exp(-u) = 1 / exp u         log(exp u) = u         exp(log u) = u, u positive
    log(u·v) = log u + log v, u positive                        1/(u·v) = 1/u · 1/v
    √(u·v) = √u · √v, u positive    √(u²) = |u|                 u · 1/u = 1, u positive
    |u·v| = |u|·|v|                 |u|² = u²                   |u| = relu(u) = u, u nonnegative
    relu(c·u) = c·relu(u), c > 0    f(-u) = -f(u), f odd        silu(u) = u · sigmoid(u)
    relu(-u) = relu(u) - u          sigmoid(-u) = 1 - sigmoid(u)
    relu(u)² = u · relu(u)          gelu(u) = u/2 · (1 + φ(u)), φ odd
    max(u + c) = max(u) + c         max(c·u) = c·max(u), c > 0  max over i of max over j = max over i and j

"Positive" is read off the form: exponentials, sizes, sums and products of such, and their powers, everywhere defined.
Every law holds wherever either side exists, so that the right side of a certified rule exists wherever the left does.
Where a form is known to exist, being of the left side, more are laws (`Forms.exists`):

    1/(1/u) = u      u · 1/u = 1      √u·√u = u      exp(log u) = u      log u - log u = 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from shardwright.pcg.errors import RuleError
from shardwright.verifier.normal import (
    ONE,
    ZERO,
    Bound,
    Exponent,
    Factor,
    Forms,
    Monomial,
    Normal,
    Payload,
    of,
    total_monomial,
    total_normal,
)

HALF = Fraction(1, 2)
ODD, EVEN = ("tanh", "sin", "erf", "phi"), ("cos",)
POSITIVE = ("sigmoid",)
Powers = tuple[tuple[Factor, Exponent], ...]


def positive_normal(normal: Normal) -> bool:
    """Whether the form is greater than 0 wherever it exists: a sum of nonnegative terms, one of them positive."""
    return nonnegative_normal(normal) and any(c > 0 and all(f.positive for f, _ in m) for m, c in normal)


def nonnegative_normal(normal: Normal) -> bool:
    """Whether the form is at least 0 wherever it exists."""
    return all(_nonnegative_term(m, c) for m, c in normal)


def _nonnegative_term(monomial: Monomial, coefficient: Fraction) -> bool:
    """A product of what is at least 0; relu(u)·v is, where u·v is."""
    if coefficient >= 0 and all(f.nonnegative or e % 2 == 0 for f, e in monomial):
        return True
    for f, e in monomial:
        if f.kind == "fn relu" and e == 1 and len(argument := _argument(f)) == 1 and argument[0][1]:
            powers = dict(monomial)
            del powers[f]
            for g, power in argument[0][0]:
                powers[g] = powers.get(g, 0) + power
            if coefficient * argument[0][1] >= 0 and all(g.nonnegative or p % 2 == 0 for g, p in powers.items()):
                return True
    return False


@dataclass
class Laws(Forms):
    """Normal forms with functions."""

    # ---- powers ----

    def raised(self, normal: Normal, exponent: Exponent) -> Normal:
        """A rational power."""
        if exponent == int(exponent) and exponent >= 0:
            return self.to_the(normal, int(exponent))
        if len(normal) == 1 and normal[0][1]:
            return self._monomial_raised(*normal[0], exponent)
        pulled, coefficient, rest = self._content(normal, free=exponent == int(exponent))
        before = self.times(self.monomial((f, e * exponent) for f, e in pulled), self._number(coefficient, exponent))
        return self.times(before, self._opaque_power(rest, exponent))

    def reciprocal(self, normal: Normal) -> Normal:
        return self.raised(normal, -1)

    def sqrt(self, normal: Normal) -> Normal:
        return self.raised(normal, HALF)

    def rsqrt(self, normal: Normal) -> Normal:
        return self.raised(normal, -HALF)

    def _opaque_power(self, base: Normal, e: Exponent) -> Normal:
        """A power of a form that is no product. Where it may be negative, roots are functions of their own."""
        positive, total = positive_normal(base), total_normal(base)
        if e == int(e) or (positive and total):
            return self.monomial([(self.factor("poly", base, positive=positive, total=total), e)])
        root = self.factor("sqrt", base, nonnegative=True, positive=positive, total=total and nonnegative_normal(base))
        if (e * 2) != int(e * 2):
            raise RuleError(f"the power {e} of a form that may be negative")
        return ((((root, int(e * 2)),), Fraction(1)),)

    def _monomial_raised(self, monomial: Monomial, coefficient: Fraction, e: Exponent) -> Normal:
        if e == int(e):
            if any(not self._cancels(f) and power < 0 for f, power in monomial):
                return self._opaque_power(((monomial, coefficient),), e)
            return self.scaled(self.monomial((f, power * e) for f, power in monomial), coefficient ** int(e))
        known, rest = _split(monomial)
        sign = 1 if coefficient > 0 else -1
        found = self.times(self.monomial((f, power * e) for f, power in known), self._number(abs(coefficient), e))
        if not rest and sign > 0:
            return found
        if sign > 0 and (e * 2) == int(e * 2) and all(p > 0 and p % 2 == 0 for _, p in rest):
            absolute = [(self._absolute(f), p * e) for f, p in rest]
            return self.times(found, self._product([(n, p) for n, p in absolute]))
        return self.times(found, self._opaque_power(((rest, Fraction(sign)),), e))

    def _product(self, powers: Sequence[tuple[Normal, Exponent]]) -> Normal:
        found = ONE
        for normal, e in powers:
            found = self.times(found, self.raised(normal, e))
        return found

    def _number(self, value: Fraction, e: Exponent) -> Normal:
        """A power of a number, which is positive where e is not an integer."""
        if e == int(e):
            return self.number(value ** int(e))
        root = _square_root(value)
        if root is not None and e * 2 == int(e * 2):
            return self.number(root ** int(e * 2))
        return self.monomial([(self.factor("poly", self.number(value), positive=True), e)])

    def _content(self, normal: Normal, free: bool) -> tuple[Powers, Fraction, Normal]:
        """Powers and a number that all monomials share, and what is left of them; with `free`, of any sign.

        What is known to be positive is taken to its least exponent, which clears denominators.
        """
        shared = [
            (f, low)
            for f in dict.fromkeys(f for m, _ in normal for f, _ in m)
            if (low := self._least(f, [dict(m).get(f, 0) for m, _ in normal], free))
        ]
        common = self._common_exponent(normal)
        powers = (*shared, *([(self.exponential(common), 1)] if common else []))
        rest = self.times(normal, self.monomial((f, -e) for f, e in powers)) if powers else normal
        leading = next((c for _, c in rest if c), Fraction(1))
        coefficient = leading if free else abs(leading)
        return powers, coefficient, self.scaled(rest, 1 / coefficient)

    @staticmethod
    def _least(f: Factor, exponents: Sequence[Exponent], free: bool) -> Exponent:
        if f.kind == "exp" or f.kind in ("poly",):
            return 0
        if f.nonzero:
            return min(exponents)
        return 0  # a factor that may be 0 stays: x·y + x·z = x·(y + z) is expanded the same way on both sides

    def _common_exponent(self, normal: Normal) -> Normal:
        """The terms that the exponents of all monomials share."""
        arguments = [next((_argument(f) for f, _ in m if f.kind == "exp"), ZERO) for m, _ in normal]
        if len(arguments) < 2:
            return ZERO
        common = set(arguments[0]).intersection(*arguments[1:])
        return self.add(*(((m, c),) for m, c in common if c))

    # ---- functions ----

    def exp(self, normal: Normal) -> Normal:
        """Logarithms of what is known to be positive leave the exponent."""
        found, kept = ONE, ZERO
        for monomial, coefficient in normal:
            inner = monomial[0][0] if len(monomial) == 1 and monomial[0][1] == 1 else None
            if inner is not None and inner.kind == "log" and (inner.total or (self.exists and coefficient == 1)):
                found = self.times(found, self.raised(inner.parts[0], coefficient))  # type: ignore[arg-type]
            else:
                kept = self.add(kept, ((monomial, coefficient),))
        return self.times(found, self.monomial([(self.exponential(kept), 1)])) if kept else found

    def log(self, normal: Normal) -> Normal:
        if len(normal) == 1 and normal[0][1]:
            return self._log_monomial(*normal[0])
        pulled, coefficient, rest = self._content(normal, free=False)
        return self.add(*(self._log_power(f, e) for f, e in pulled), self._log_number(coefficient), self._log(rest))

    def _log_monomial(self, monomial: Monomial, coefficient: Fraction) -> Normal:
        known, rest = _split(monomial)
        found = self.add(*(self._log_power(f, e) for f, e in known))
        if not rest and coefficient > 0:
            return self.add(found, self._log_number(coefficient))
        if len(rest) == 1 and rest[0][1] % 2 == 1 and coefficient > 0:
            power = self.scaled(self._log(of(rest[0][0])), Fraction(rest[0][1]))
            return self.add(found, self._log_number(coefficient), power)
        return self.add(found, self._log(((rest, coefficient),)))

    def _log_power(self, f: Factor, e: Exponent) -> Normal:
        inner: Normal = f.parts[0] if f.kind == "exp" else self._log(of(f))  # type: ignore[assignment]
        return self.scaled(inner, Fraction(e))

    def _log_number(self, value: Fraction) -> Normal:
        return ZERO if value == 1 else self._log(self.number(value))

    def _log(self, argument: Normal) -> Normal:
        if len(argument) == 1 and argument[0][1] == 1 and len(argument[0][0]) == 1:
            ((f, e),) = argument[0][0]
            if f.kind == "poly" and f.nonzero and e == 1:
                argument = f.parts[0]  # type: ignore[assignment]
        return of(self.factor("log", argument, total=positive_normal(argument) and total_normal(argument)))

    def absolute(self, normal: Normal) -> Normal:
        if nonnegative_normal(normal):
            return normal
        if len(normal) == 1 and normal[0][1]:
            monomial, coefficient = normal[0]
            powers = [(of(f) if e % 2 == 0 else self._absolute(f), e) for f, e in monomial]
            return self.scaled(self._product(powers), abs(coefficient))
        return of(self.factor("abs", self._oriented(normal)[0], nonnegative=True, total=total_normal(normal)))

    def _absolute(self, f: Factor) -> Normal:
        if f.nonnegative:
            return of(f)
        return of(self.factor("abs", of(f), nonnegative=True, total=f.total))

    @staticmethod
    def _oriented(normal: Normal) -> tuple[Normal, int]:
        """The form or its negative, whichever leads with a positive coefficient, and the sign."""
        sign = -1 if next((c for _, c in normal if c), Fraction(1)) < 0 else 1
        return tuple((m, c * sign) for m, c in normal), sign

    def function(self, name: str, *arguments: Normal) -> Normal:
        """A function of elements by its name, as far as it has laws; others are known by their arguments only."""
        (first, *_) = arguments
        simple = {"exp": self.exp, "log": self.log, "sqrt": self.sqrt, "rsqrt": self.rsqrt, "abs": self.absolute,
                  "reciprocal": self.reciprocal}  # fmt: skip
        if name in simple:
            return simple[name](first)
        if name == "silu":
            return self.times(first, self.function("sigmoid", first))
        if name == "sigmoid" and self._oriented(first)[1] < 0:
            return self.add(ONE, self.scaled(self.function("sigmoid", self.scaled(first, -1)), -1))
        if name.startswith("gelu "):  # φ is erf(u/√2), or what approximates it
            half = self.scaled(first, HALF)
            return self.times(half, self.add(ONE, self.function(f"phi {name[5:]}", first)))
        if name == "relu":
            return self.relu(first)
        sign = 1
        odd = name.split(" ")[0] in ODD
        if odd or name in EVEN:
            oriented, sign = self._oriented(first)
            if not first:
                return ZERO if odd else ONE
            arguments, sign = (oriented,), sign if odd else 1
        f = self.factor(
            f"fn {name}", *arguments, positive=name in POSITIVE,
            total=all(map(total_normal, arguments)) and name.split(" ")[0] in TOTAL,
        )  # fmt: skip
        return self.scaled(of(f), sign)

    def relu(self, normal: Normal) -> Normal:
        """What is known to be positive stands before it."""
        if not normal or nonnegative_normal(normal):
            return normal
        if len(normal) == 1:
            known, factors = _split(normal[0][0])
            coefficient = normal[0][1]
            if not coefficient:  # of a product that may not exist
                known, factors = (), normal[0][0]
            scale, rest = abs(coefficient) or Fraction(1), ((factors, _sign(coefficient)),)
        else:
            known, scale, rest = self._content(normal, free=False)
            if self._is_relu(rest):
                return normal
        oriented, sign = self._oriented(rest)
        f = self.factor("fn relu", oriented, nonnegative=True, total=total_normal(rest))
        found = of(f) if sign > 0 else self.add(of(f), self.scaled(oriented, -1))
        return self.scaled(self.times(self.monomial(known), found), scale)

    def _is_relu(self, normal: Normal) -> bool:
        """Whether the form is relu(u) - u, which is relu(-u), up to a positive number."""
        found = [(f, c) for m, c in normal if len(m) == 1 and c > 0 for f, e in m if f.kind == "fn relu" and e == 1]
        return any(self.add(of(f), self.scaled(_argument(f), -1)) == self.scaled(normal, 1 / c) for f, c in found)

    def rebuilt(self, f: Factor, parts: tuple[Payload, ...]) -> Normal:
        """A factor like f of other parts."""
        normal: Normal = parts[0]  # type: ignore[assignment]
        if f.kind.startswith("fn "):
            return self.function(f.kind[3:], *parts)  # type: ignore[arg-type]
        again = {"exp": self.exp, "log": self.log, "sqrt": self.sqrt, "abs": self.absolute}
        if f.kind in again:
            return again[f.kind](normal)
        return normal if f.kind == "poly" else super().rebuilt(f, parts)

    # ---- maxima ----

    def maximum(self, alternatives: Sequence[tuple[Sequence[Bound], Normal]]) -> Normal:
        """The greatest of families of forms, none of them empty."""
        if any(not self.is_positive(size) for bounds, _ in alternatives for _, size in bounds):
            raise RuleError("a maximum over what may be empty")
        flat = [inner for a in alternatives for inner in self._flattened(*a)]
        flat = [([b for b in bounds if any(b[0] in f.names for m, _ in n for f, _ in m)], n) for bounds, n in flat]
        if len(flat) == 1:
            return self._maximum_of_one(*flat[0])
        shared = set(flat[0][1]).intersection(*(n for _, n in flat[1:]))
        bound = {name for bounds, _ in flat for name, _ in bounds}
        free = {(m, c) for m, c in shared if all(f.names.isdisjoint(bound) for f, _ in m)}
        f = self.closed_max([(bounds, tuple(t for t in n if t not in free)) for bounds, n in flat])
        pulled = self.add(*((term,) for term in free))
        if len(f.parts) == 1:  # all alternatives are one
            return self.add(pulled, self._maximum_of_one(*self.opened_alternative(f.parts[0])))
        return self.add(pulled, of(f))

    def _flattened(self, bounds: Sequence[Bound], normal: Normal) -> list[tuple[list[Bound], Normal]]:
        """An alternative with the maxima among its terms taken outside: max_i (c + max_j u) = max_ij (c + u)."""
        at = next((i for i, (m, c) in enumerate(normal) if c > 0 and len(m) == 1 and m[0][0].kind == "max"
                   and m[0][1] == 1), None)  # fmt: skip
        if at is None:
            return [(list(bounds), normal)]
        ((f, _),), coefficient = normal[at]
        rest = (*normal[:at], *normal[at + 1 :])
        found: list[tuple[list[Bound], Normal]] = []
        for alternative in f.parts:
            inner, body = self.opened_alternative(alternative)
            found += self._flattened([*bounds, *inner], self.add(rest, self.scaled(body, coefficient)))
        return found

    def _maximum_of_one(self, bounds: Sequence[Bound], normal: Normal) -> Normal:
        """max over i and j of (u_i + v_j + c) = max_i u_i + max_j v_j + c."""
        sizes = dict(bounds)
        found, groups = ZERO, list[tuple[set[str], Normal]]()
        for monomial, coefficient in normal:
            names = {name for f, _ in monomial for name in f.names if name in sizes}
            term: Normal = ((monomial, coefficient),)
            if not names:
                found = self.add(found, term)
                continue
            touching = [g for g in groups if g[0] & names]
            groups = [g for g in groups if not g[0] & names]
            groups.append((names.union(*(g[0] for g in touching)), self.add(term, *(g[1] for g in touching))))
        for names, body in groups:
            family = [(name, sizes[name]) for name in sorted(names)]
            found = self.add(found, self._family(family, body))
        return found

    def _family(self, bounds: Sequence[Bound], body: Normal) -> Normal:
        """The maximum of one connected family; a positive number stands before it."""
        ((_, closed),) = self.closed_max([(bounds, body)]).parts  # type: ignore[misc]
        scale = abs(next((c for _, c in closed if c), Fraction(1)))  # type: ignore[misc, attr-defined]
        return self.scaled(of(self.closed_max([(bounds, self.scaled(body, 1 / scale))])), scale)


TOTAL = frozenset(
    {"relu", "phi", "sigmoid", "tanh", "sin", "cos", "erf", "sign", "softplus", "ceil", "floor", "minimum"}
)
"""Functions that exist for all numbers; others may not, and do not cancel."""


def _split(monomial: Monomial) -> tuple[Powers, Powers]:
    """The powers that are known to be positive, and the others."""
    known = tuple((f, e) for f, e in monomial if f.positive)
    return known, tuple((f, e) for f, e in monomial if not f.positive)


def _argument(f: Factor) -> Normal:
    return f.parts[0]  # type: ignore[return-value]


def _sign(value: Fraction) -> Fraction:
    return Fraction((value > 0) - (value < 0))


def _square_root(value: Fraction) -> Fraction | None:
    top, bottom = isqrt(value.numerator), isqrt(value.denominator)
    return Fraction(top, bottom) if top * top == value.numerator and bottom * bottom == value.denominator else None


__all__ = ["Laws", "positive_normal", "total_monomial"]
