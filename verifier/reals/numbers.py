"""Functions of real numbers, for the second proof of serial rules: uninterpreted, but for a few laws.

exp(u + v) = exp u · exp v      exp(k·u) = (exp u)^k, k whole      exp u > 0      u · inverse(u) = 1
log(u · v) = log u + log v and exp(log u) = u, u positive          log(exp u) = u      f(-u) = -f(u), f odd
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.pcg.errors import RuleError
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.reals.numbersums import Sums, is_function, multiplied, total_of

Need = tuple[str, Number]
"""What exists: a function of an argument, or the "inverse" of what is not 0."""


@dataclass
class Numbers(Sums):
    """The sums and functions of one proof.

    needs   what must exist for the numbers that were made so far to exist
    """

    needs: list[Need] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)

    # ---- functions ----

    def function(self, name: str, *arguments: Number, partial: bool = False) -> Number:
        """An uninterpreted function; a partial one exists where it says so."""
        flat = [self.flat(a) for a in arguments]
        if partial:
            self.needs.append((name, flat[0]))
        return z3.Function(name, *(z3.RealSort() for _ in range(len(flat) + 1)))(*flat)

    def odd(self, name: str, number: Number) -> Number:
        """An odd function: of the number or of its negative, whichever is written first."""
        flat, other = self.flat(number), self.flat(-number)
        return -self.function(name, other) if other.sexpr() < flat.sexpr() else self.function(name, flat)

    def exp(self, number: Number) -> Number:
        """exp, of each summand for itself."""
        found = z3.RealVal(1)
        for coefficient, factors in self.monomials(number):
            if not factors and not coefficient:
                continue
            times = coefficient.numerator if factors and coefficient.denominator == 1 and abs(coefficient) < 5 else 1
            one = self._exp(z3.Product([*factors, z3.RealVal(coefficient / times)]))
            power = one if times > 0 else self.inverse(one)
            found = found * z3.Product([power] * abs(times))
        return found

    def _exp(self, number: Number) -> Number:
        flat = self.flat(number)
        if is_function(flat, "log") and self.is_positive(flat.arg(0)):
            return flat.arg(0)
        found = self.function("exp", flat)
        self._fact(found, found > 0)
        return found

    def log(self, number: Number) -> Number:
        """log of a product of exponentials and of one other factor, which is its sum."""
        monomials = self.monomials(number)
        if len(monomials) != 1 or monomials[0][0] != 1:
            return self.function("log", number, partial=True)
        terms: list[Number] = []
        for f in monomials[0][1]:
            if is_function(f, "exp"):
                terms.append(f.arg(0))
            elif is_function(f, "inverse") and self.is_positive(f.arg(0)):
                terms.append(-self.log(f.arg(0)))
            else:
                terms.append(self.function("log", f, partial=not self.is_positive(f)))
        partial = [t for t in monomials[0][1] if not is_function(t, "exp") and not self._surely(t)]
        return z3.Sum(terms) if len(partial) < 2 else self.function("log", number, partial=True)

    def _surely(self, number: Number) -> bool:
        return self.is_positive(number.arg(0) if is_function(number, "inverse") else number)

    def inverse(self, number: Number) -> Number:
        """1/u, of each factor for itself."""
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
        found = z3.Function("inverse", z3.RealSort(), z3.RealSort())(flat)
        if not self.is_positive(flat):
            self.needs.append(("inverse", flat))
        self._fact(found, flat * found == 1)
        return found

    def _fact(self, about: Number, fact: Formula) -> None:
        if about.get_id() not in self._known:
            self._known.add(about.get_id())
            self.facts.append(fact)
