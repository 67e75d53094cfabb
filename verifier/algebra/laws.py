"""The laws of functions over the reals that normal forms use.

    exp(u + v) = exp u · exp v      exp(-u) = 1 / exp u         log(exp u) = u         exp(log u) = u, u positive
    log(u·v) = log u + log v, u positive                        1/(u·v) = 1/u · 1/v
    √(u·v) = √u · √v, u positive    √(u²) = |u|                 u · 1/u = 1, u positive
    |u·v| = |u|·|v|                 |u|² = u²                   |u| = relu(u) = u, u nonnegative
    relu(c·u) = c·relu(u), c > 0    f(-u) = -f(u), f odd        silu(u) = u · sigmoid(u)
    relu(-u) = relu(u) - u          sigmoid(-u) = 1 - sigmoid(u)
    relu(u)² = u · relu(u)          gelu(u) = u/2 · (1 + φ(u)), φ odd
    max(u + c) = max(u) + c         max(c·u) = c·max(u), c > 0  max over i of max over j = max over i and j

"Positive" is read off the form: exponentials, sizes, their sums and products, and powers of these, if defined
everywhere. Every law holds wherever either side exists, so the right side of a certified rule exists wherever the left
does. Where a form is known to exist, as a form of the left side, further laws hold (`Forms.exists`):

    1/(1/u) = u      u · 1/u = 1      √u·√u = u      exp(log u) = u      log u - log u = 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from shardwright.pcg.errors import RuleError
from shardwright.verifier.algebra.monomials import (
    ONE,
    ZERO,
    Bound,
    Exponent,
    Monomial,
    Normal,
    NormalFactor,
    Payload,
    argument_of,
    of,
    total_normal,
)
from shardwright.verifier.algebra.powers import HALF, PowerLaws, nonnegative_normal, positive_normal, split_signs

ODD, EVEN = ("tanh", "sin", "erf", "phi"), ("cos",)
POSITIVE = ("sigmoid",)


@dataclass
class Laws(PowerLaws):
    """Normal forms with functions."""

    # ---- functions ----

    def exp(self, normal: Normal) -> Normal:
        """Return exp of a form; logarithms of forms that are known to be positive leave the exponent."""
        product, rest = ONE, ZERO
        for monomial, coefficient in normal:
            inner = monomial[0][0] if len(monomial) == 1 and monomial[0][1] == 1 else None
            if inner is not None and inner.kind == "log" and (inner.total or (self.exists and coefficient == 1)):
                self.used.add("log")
                self.noted(coefficient != 1, "exp-of-multiple")
                self.noted(len(normal) > 1, "exp")
                product = self.times(product, self.raised(inner.parts[0], coefficient))  # type: ignore[arg-type]
            else:
                rest = self.add(rest, ((monomial, coefficient),))
        return self.times(product, self.monomial([(self.exponential(rest), 1)])) if rest else product

    def log(self, normal: Normal) -> Normal:
        if len(normal) == 1 and normal[0][1]:
            return self._log_monomial(*normal[0])
        pulled, coefficient, rest = self._content(normal, free=False)
        self.noted(bool(pulled) or coefficient != 1, "log-of-product", "distribute")
        return self.add(*(self._log_power(f, e) for f, e in pulled), self._log_number(coefficient), self._log(rest))

    def _log_monomial(self, monomial: Monomial, coefficient: Fraction) -> Normal:
        known, rest = split_signs(monomial)
        self.noted(len(known) + bool(rest) + (coefficient != 1) > 1, "log-of-product")
        self.noted(bool(rest) and rest[0][1] != 1, "log-of-power")
        logs = self.add(*(self._log_power(f, e) for f, e in known))
        if not rest and coefficient > 0:
            return self.add(logs, self._log_number(coefficient))
        if len(rest) == 1 and rest[0][1] % 2 == 1 and coefficient > 0:
            power = self.scaled(self._log(of(rest[0][0])), Fraction(rest[0][1]))
            return self.add(logs, self._log_number(coefficient), power)
        return self.add(logs, self._log(((rest, coefficient),)))

    def _log_power(self, f: NormalFactor, e: Exponent) -> Normal:
        self.noted(e != 1, "log-of-power")
        self.noted(f.kind == "exp", "log")
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
        if self.noted(nonnegative_normal(normal), "abs-of-nonnegative"):
            return normal
        self.noted(self._oriented(normal)[1] < 0, "abs-of-product")
        if len(normal) == 1 and normal[0][1]:
            monomial, coefficient = normal[0]
            self.noted(len(monomial) > 1 or coefficient != 1, "abs-of-product")
            powers = (self.raised(of(f) if e % 2 == 0 else self.absolute_factor(f), e) for f, e in monomial)
            return self.scaled(self.product(*powers), abs(coefficient))
        return of(self.factor("abs", self._oriented(normal)[0], nonnegative=True, total=total_normal(normal)))

    @staticmethod
    def _oriented(normal: Normal) -> tuple[Normal, int]:
        """Return the form or its negative, whichever leads with a positive coefficient, and the sign."""
        sign = -1 if next((c for _, c in normal if c), Fraction(1)) < 0 else 1
        return tuple((m, c * sign) for m, c in normal), sign

    def function(self, name: str, *arguments: Normal) -> Normal:
        """Return a function of elements, by its laws; functions without laws are known by their arguments only."""
        (first, *_) = arguments
        simple = {"exp": self.exp, "log": self.log, "sqrt": self.sqrt, "rsqrt": self.rsqrt, "abs": self.absolute,
                  "reciprocal": self.reciprocal}  # fmt: skip
        if name in simple:
            return simple[name](first)
        if name == "silu":
            self.used.add("silu")
            return self.times(first, self.function("sigmoid", first))
        if name == "sigmoid" and self.noted(self._oriented(first)[1] < 0, "sigmoid-of-negative"):
            return self.add(ONE, self.scaled(self.function("sigmoid", self.scaled(first, -1)), -1))
        if name.startswith("gelu "):  # φ is erf(u/√2) or its approximation
            self.used.add("gelu")
            half = self.scaled(first, HALF)
            return self.times(half, self.add(ONE, self.function(f"phi {name[5:]}", first)))
        if name == "relu":
            return self.relu(first)
        sign = 1
        odd = name.split(" ")[0] in ODD
        if odd or name in EVEN:
            oriented, sign = self._oriented(first)
            self.noted(sign < 0 or (odd and not first), "odd-functions" if odd else "even-functions")
            if not first:
                return ZERO if odd else ONE
            arguments, sign = (oriented,), sign if odd else 1
        f = self.factor(
            f"fn {name}", *arguments, positive=name in POSITIVE,
            total=all(map(total_normal, arguments)) and name.split(" ")[0] in TOTAL,
        )  # fmt: skip
        return self.scaled(of(f), sign)

    def relu(self, normal: Normal) -> Normal:
        """Return relu of a form, with factors that are known to be positive before it."""
        if self.noted(not normal or nonnegative_normal(normal), "relu-of-nonnegative"):
            return normal
        if len(normal) == 1:
            known, factors = split_signs(normal[0][0])
            coefficient = normal[0][1]
            if not coefficient:  # the coefficient of a product that may not exist
                known, factors = (), normal[0][0]
            scale, rest = abs(coefficient) or Fraction(1), ((factors, _sign(coefficient)),)
        else:
            known, scale, rest = self._content(normal, free=False)
            if self.noted(self._is_relu(rest), "relu-of-negative", "relu-of-nonnegative"):
                return normal
        self.noted(bool(known) or scale != 1, "relu-of-scaled")
        oriented, sign = self._oriented(rest)
        self.noted(sign < 0, "relu-of-negative")
        f = self.factor("fn relu", oriented, nonnegative=True, total=total_normal(rest))
        relu = of(f) if sign > 0 else self.add(of(f), self.scaled(oriented, -1))
        return self.scaled(self.times(self.monomial(known), relu), scale)

    def _is_relu(self, normal: Normal) -> bool:
        """Return whether the form is relu(u) - u, which is relu(-u), up to a positive number."""
        relus = [(f, c) for m, c in normal if len(m) == 1 and c > 0 for f, e in m if f.kind == "fn relu" and e == 1]
        return any(self.add(of(f), self.scaled(argument_of(f), -1)) == self.scaled(normal, 1 / c) for f, c in relus)

    def rebuilt(self, f: NormalFactor, parts: tuple[Payload, ...]) -> Normal:
        """Return a factor like f with other parts."""
        if f.kind.startswith("fn ") or f.kind in ("exp", "log", "sqrt", "abs"):
            return self.function(f.kind.removeprefix("fn "), *parts)  # type: ignore[arg-type]
        return parts[0] if f.kind == "poly" else super().rebuilt(f, parts)  # type: ignore[return-value]

    # ---- maxima ----

    def maximum(self, alternatives: Sequence[tuple[Sequence[Bound], Normal]]) -> Normal:
        """Return the maximum over families of forms, none of them empty."""
        if any(not self.is_positive(size) for bounds, _ in alternatives for _, size in bounds):
            raise RuleError("a maximum over what may be empty")
        flat = [inner for a in alternatives for inner in self._flattened(*a)]
        given = sum(len(bounds) for bounds, _ in flat)
        flat = [([b for b in bounds if any(b[0] in f.names for m, _ in n for f, _ in m)], n) for bounds, n in flat]
        self.noted(sum(len(bounds) for bounds, _ in flat) < given, "max-of-equal")
        if len(flat) == 1:
            return self._maximum_of_one(*flat[0])
        shared = set(flat[0][1]).intersection(*(n for _, n in flat[1:]))
        bound = {name for bounds, _ in flat for name, _ in bounds}
        free = {(m, c) for m, c in shared if all(f.names.isdisjoint(bound) for f, _ in m)}
        f = self.closed_max([(bounds, tuple(t for t in n if t not in free)) for bounds, n in flat])
        self.noted(bool(free), "max-of-shifted")
        pulled = self.add(*((term,) for term in free))
        if len(f.parts) == 1:  # all alternatives are equal
            return self.add(pulled, self._maximum_of_one(*self.opened_alternative(f.parts[0])))
        return self.add(pulled, of(f))

    def _flattened(self, bounds: Sequence[Bound], normal: Normal) -> list[tuple[list[Bound], Normal]]:
        """Return an alternative with inner maxima taken outside: max_i (c + max_j u) = max_ij (c + u)."""
        at = next((i for i, (m, c) in enumerate(normal) if c > 0 and len(m) == 1 and m[0][0].kind == "max"
                   and m[0][1] == 1), None)  # fmt: skip
        if at is None:
            return [(list(bounds), normal)]
        self.used.add("max-of-max")
        self.noted(len(normal) > 1, "max-of-shifted")
        ((f, _),), coefficient = normal[at]
        rest = (*normal[:at], *normal[at + 1 :])
        families: list[tuple[list[Bound], Normal]] = []
        for alternative in f.parts:
            inner, body = self.opened_alternative(alternative)
            families += self._flattened([*bounds, *inner], self.add(rest, self.scaled(body, coefficient)))
        return families

    def _maximum_of_one(self, bounds: Sequence[Bound], normal: Normal) -> Normal:
        """Apply max over i and j of (u_i + v_j + c) = max_i u_i + max_j v_j + c."""
        sizes = dict(bounds)
        maximum, groups = ZERO, list[tuple[set[str], Normal]]()
        for monomial, coefficient in normal:
            names = {name for f, _ in monomial for name in f.names if name in sizes}
            term: Normal = ((monomial, coefficient),)
            if not names:
                maximum = self.add(maximum, term)
                continue
            touching = [g for g in groups if g[0] & names]
            groups = [g for g in groups if not g[0] & names]
            groups.append((names.union(*(g[0] for g in touching)), self.add(term, *(g[1] for g in touching))))
        self.noted(bool(maximum) or len(groups) > 1, "max-of-shifted")
        for names, body in groups:
            family = [(name, sizes[name]) for name in sorted(names)]
            maximum = self.add(maximum, self._family(family, body))
        return maximum

    def _family(self, bounds: Sequence[Bound], body: Normal) -> Normal:
        """Return the maximum of one connected family, with a positive number before it."""
        ((_, closed),) = self.closed_max([(bounds, body)]).parts  # type: ignore[misc]
        scale = abs(next((c for _, c in closed if c), Fraction(1)))  # type: ignore[misc, attr-defined]
        self.noted(scale != 1, "max-of-scaled")
        return self.scaled(of(self.closed_max([(bounds, self.scaled(body, 1 / scale))])), scale)


TOTAL = frozenset(
    {"relu", "phi", "sigmoid", "tanh", "sin", "cos", "erf", "sign", "softplus", "ceil", "floor", "minimum"}
)
"""Functions that exist for all numbers. Other functions may not, and do not cancel."""


def _sign(value: Fraction) -> Fraction:
    return Fraction((value > 0) - (value < 0))
