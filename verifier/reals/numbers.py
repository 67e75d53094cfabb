"""Functions of real numbers for the second proof of serial rules: uninterpreted, except for a few laws.

exp(u + v) = exp u · exp v      exp(k·u) = (exp u)^k, k whole      exp u > 0      u · inverse(u) = 1
log(u · v) = log u + log v and exp(log u) = u, u positive          log(exp u) = u      f(-u) = ∓f(u), f odd or even
√u > 0 and √u · √u = u          √(u · v) = √u · √v, u positive     [c] · [c] = [c]
exp(u) = [c] · exp(u where c) + (1 - [c]) · exp(u where not c)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.pcg.errors import RuleError
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.reals.numbersums import Sums, is_function, is_indicator, multiplied, total_of

Need = tuple[str, Number]
"""A condition of existence: a function at an argument, or the "inverse" of a number, which must not be 0."""


@dataclass
class RealNumbers(Sums):
    """The sums and functions of one proof.

    needs   the conditions under which the numbers made so far exist
    """

    needs: list[Need] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)

    # ---- functions ----

    def function(self, name: str, *arguments: Number, partial: bool = False) -> Number:
        """Return an uninterpreted function of numbers; the existence of a partial one is added to `needs`."""
        flat = [self.flat(a) for a in arguments]
        if partial:
            self.needs.append((name, flat[0]))
        return z3.Function(name, *(z3.RealSort() for _ in range(len(flat) + 1)))(*flat)

    def odd(self, name: str, number: Number) -> Number:
        """Return an odd function, written with the number or its negative, whichever text comes first."""
        flat, other = self.flat(number), self.flat(-number)
        return -self.function(name, other) if other.sexpr() < flat.sexpr() else self.function(name, flat)

    def even(self, name: str, number: Number) -> Number:
        """Return an even function, written with the number or its negative, whichever text comes first."""
        return self.function(name, min(self.flat(number), self.flat(-number), key=lambda flat: flat.sexpr()))

    def root(self, number: Number) -> Number:
        """Return a root, separately for each positive factor; it has a value and a slope at positive numbers."""
        (coefficient, factors), *more = self.monomials(number)
        if more or coefficient != 1:
            return self._root(number)
        rest = [f for f in factors if not self._surely(f)]
        separate = [f for f in factors if self._surely(f)] + ([z3.Product(rest)] if rest else [])
        return z3.Product([z3.RealVal(1), *map(self._root, separate)])

    def _root(self, number: Number) -> Number:
        flat = self.flat(number)
        root = self.function("sqrt", flat, partial=not self._surely(flat))
        self._fact(root, z3.And(root > 0, root * root == flat))
        return root

    def indicator(self, condition: str, number: Number) -> Number:
        """Return the number that is 1 where a condition on a number holds, else 0."""
        return self.function(f"[{condition}]", number)

    def exp(self, number: Number) -> Number:
        """Return exp, separately for each summand, by cases of the conditions in the number."""
        product, monomials = z3.RealVal(1), self.monomials(number)
        condition = next((f for _, factors in monomials for f in factors if is_indicator(f)), None)
        if condition is not None:
            free = [(c, factors) for c, factors in monomials if not any(f.eq(condition) for f in factors)]
            held = [(c, [f for f in factors if not f.eq(condition)]) for c, factors in monomials]
            return condition * self.exp(total_of(held)) + (1 - condition) * self.exp(total_of(free))
        for coefficient, factors in monomials:
            if not factors and not coefficient:
                continue
            times = coefficient.numerator if factors and coefficient.denominator == 1 and abs(coefficient) < 5 else 1
            one = self._exp(z3.Product([*factors, z3.RealVal(coefficient / times)]))
            power = one if times > 0 else self.inverse(one)
            product = product * z3.Product([power] * abs(times))
        return product

    def _exp(self, number: Number) -> Number:
        flat = self.flat(number)
        if is_function(flat, "log") and self.is_positive(flat.arg(0)):
            return flat.arg(0)
        power = self.function("exp", flat)
        self._fact(power, power == flat.arg(0) if is_function(flat, "log") else power > 0)
        return power

    def log(self, number: Number) -> Number:
        """Return log; for a product of exponentials and at most one other factor, as the sum of the factors' logs."""
        (coefficient, factors), *more = self.monomials(number)
        if more or coefficient != 1 or sum(not self._surely(f) for f in factors) > 1:
            return self.function("log", number, partial=True)
        return z3.Sum([z3.RealVal(0), *map(self._log, factors)])

    def _log(self, factor: Number) -> Number:
        if is_function(factor, "exp"):
            return factor.arg(0)
        if is_function(factor, "inverse"):
            return -self._log(factor.arg(0))
        return self.function("log", factor, partial=not self.is_positive(factor))

    def _surely(self, factor: Number) -> bool:
        return self.is_positive(factor.arg(0) if is_function(factor, "inverse") else factor)

    def inverse(self, number: Number) -> Number:
        """Return 1/u, separately for each factor."""
        monomials = self.monomials(number)
        if len(monomials) != 1:
            return self._inverse(total_of(monomials))
        coefficient, factors = monomials[0]
        if not coefficient:
            raise RuleError("division by 0")
        return z3.Product([z3.RealVal(1 / coefficient), *map(self._inverse, factors)])

    def _inverse(self, number: Number) -> Number:
        if is_function(number, "inverse"):
            return number.arg(0)
        flat = multiplied(number)
        inverse = z3.Function("inverse", z3.RealSort(), z3.RealSort())(flat)
        if not self.is_positive(flat):
            self.needs.append(("inverse", flat))
        self._fact(inverse, flat * inverse == 1)
        return inverse

    def _fact(self, about: Number, fact: Formula) -> None:
        if about.get_id() not in self._known:
            self._known.add(about.get_id())
            self.facts.append(fact)
