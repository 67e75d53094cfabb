"""Real numbers with sums over indices, as Z3 expressions: the arithmetic of the second proof of serial rules.

A sum is represented by a constant: `Σ_i x[b, i]·w[o, i]` is "sum 3", and equal sums are the same constant. Z3
multiplies summands out (`simplify` with `som`). Here, factors that do not depend on an index are put before its sum,
sums within sums are opened, and the remaining sums are named. All other algebra is Z3's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count, groupby, permutations, product
from typing import NamedTuple

from shardwright.pcg.errors import RuleError
from shardwright.verifier.algebra.polys import Atom, Poly
from shardwright.verifier.logic import Formula, Number, z3

Binding = tuple[Number, Poly]
"""An index and the number of its values."""
RealProduct = tuple[Fraction, list[Number]]
MAX_BOUNDS = 4
INDEX = ("@", "~", "#")
"""The prefixes of indices' names: free ones, bound ones, and bound ones of a named sum."""


@dataclass(frozen=True, eq=False)
class NamedSum:
    """A named sum over bounds of a product, or a named maximum of an expression, which is then the only factor."""

    kind: str
    bounds: tuple[Binding, ...]
    factors: tuple[Number, ...]
    height: int
    depends: frozenset[str]


class _Seen(NamedTuple):
    """The indices, names of sums and height in a number. The number is kept so that its id is not reused."""

    number: Number
    indices: frozenset[str]
    sums: frozenset[str] = frozenset()
    height: int = 0


@dataclass
class Sums:
    """The sums of one proof.

    is_size   returns whether a name or an application is at least 1
    implied   (variable, one, other): where the indicator `one` of an element of the variable is 1, so is `other`
    """

    is_size: Callable[[Atom], bool]
    facts: list[Formula] = field(default_factory=list)
    implied: set[tuple[str, str, str]] = field(default_factory=set)
    _sums: dict[str, NamedSum] = field(default_factory=dict)
    _named: dict[tuple[str, tuple[str, ...], str], Number] = field(default_factory=dict)
    _met: dict[int, _Seen] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=count)

    # ---- products ----

    def monomials(self, number: Number) -> list[RealProduct]:
        """Return the coefficients and factors of a number, without u · inverse(u) and implied indicators."""
        return self._multiplied(number)[1]

    def flat(self, number: Number) -> Number:
        """Return a number in the form to which Z3 multiplies it out."""
        return self._multiplied(number)[0]

    def _multiplied(self, number: Number) -> tuple[Number, list[RealProduct]]:
        """Return a number multiplied out, and its monomials."""
        flat = multiplied(number)
        products = [_factors(term) for term in (flat.children() if _kind(flat) == z3.Z3_OP_ADD else [flat])]
        changed = [_cancel(factors) or self._masked(factors) for _, factors in products]
        return self._multiplied(total_of(products)) if any(changed) else (flat, products)

    def _masked(self, factors: list[Number]) -> bool:
        """Drop an indicator that another factor implies, [c] · [c] = [c]; return whether there was one."""
        for at, f in enumerate(factors):
            others = (*factors[:at], *factors[at + 1 :]) if is_indicator(f) else ()
            if any(g.eq(f) or self._implies(g, f) for g in others):
                del factors[at]
                return True
        return False

    def _implies(self, one: Number, other: Number) -> bool:
        argument = other.arg(0)
        return (name_of(argument), name_of(one), name_of(other)) in self.implied and argument.eq(one.arg(0))

    def size(self, value: Poly) -> Number:
        """Return a size as a real number."""
        return total_of([(Fraction(c), list(map(self._atom, atoms))) for atoms, c in value.terms])

    def _atom(self, atom: Atom) -> Number:
        return z3.Real(f"size {atom}" if self.is_size(atom) else f"number {atom}")

    def nonempty(self, size: Poly) -> bool:
        return bool(size.terms) and all(c > 0 and all(map(self.is_size, atoms)) for atoms, c in size.terms)

    # ---- sums ----

    def bound(self) -> Number:
        """Return a new index."""
        return z3.Int(f"~{next(self._fresh)}")

    def total(self, bounds: Sequence[Binding], number: Number) -> Number:
        """Return Σ over the bounds."""
        return sum_of([self._summed(bounds, c, factors) for c, factors in self.monomials(number)])

    def _summed(self, bounds: Sequence[Binding], coefficient: Fraction, factors: Sequence[Number]) -> Number:
        free, inside, inner = list[Number](), list[Number](), {name_of(n): (n, size) for n, size in bounds}
        pending = list(factors)
        while pending:
            f = pending.pop()
            if self.depends(f).isdisjoint(inner):
                free.append(f)
            elif (summed := self._sum(f)) is not None and summed.kind == "sum":
                opened, more = self._opened(summed)
                inner |= {name_of(n): (n, size) for n, size in opened}
                pending += more
            else:
                inside.append(f)
        used = set[str]()
        for names, members in self._apart(inside, set(inner)):
            used |= names
            free.append(self._name("sum", [inner[n] for n in sorted(names)], members))
        free += [self.size(size) for name, (_, size) in inner.items() if name not in used]
        return product_of(coefficient, free)

    def _apart(self, factors: Sequence[Number], names: set[str]) -> list[tuple[set[str], list[Number]]]:
        """Return the factors in groups that share no index."""
        groups = list[tuple[set[str], list[Number]]]()
        for f in factors:
            names_of_group, members = set(self.depends(f)) & names, [f]
            for group in [g for g in groups if g[0] & names_of_group]:
                groups.remove(group)
                names_of_group, members = names_of_group | group[0], members + group[1]
            groups.append((names_of_group, members))
        return groups

    def greatest(self, bounds: Sequence[Binding], number: Number) -> Number:
        """Return the maximum over the bounds, with independent terms and a positive number before it."""
        names = {name_of(n) for n, _ in bounds}
        free_terms, inside = list[RealProduct](), list[RealProduct]()
        for c, factors in self.monomials(number):
            free = all(self.depends(f).isdisjoint(names) for f in factors)
            (free_terms if free else inside).append((c, factors))
        if not inside:
            return number
        scale = abs(inside[0][0])
        body = multiplied(total_of([(c / scale, factors) for c, factors in inside]))
        if (inner := self._sum(body)) is not None and inner.kind == "max":
            opened, (body,) = self._opened(inner)
            return total_of(free_terms) + z3.RealVal(scale) * self.greatest([*bounds, *opened], body)
        return total_of(free_terms) + z3.RealVal(scale) * self._name("max", list(bounds), [body])

    def _name(self, kind: str, bounds: Sequence[Binding], factors: Sequence[Number]) -> Number:
        """Return the constant of a sum, which does not depend on the order and names of its indices."""
        if len(bounds) > MAX_BOUNDS:
            raise RuleError(f"a sum over {len(bounds)} indices")
        height = 1 + max(self._seen(f).height for f in factors)
        best: tuple[tuple[str, ...], str, tuple[Binding, ...], Number] | None = None
        for order in _orders(bounds):
            bounds_in_order = tuple((z3.Int(f"#{height}.{i}"), size) for i, (_, size) in enumerate(order))
            swap = {name_of(old): new for (old, _), (new, _) in zip(order, bounds_in_order, strict=True)}
            body = multiplied(self.renamed(product_of(Fraction(1), factors), swap))
            candidate = (tuple(str(size) for _, size in bounds_in_order), body.sexpr(), bounds_in_order, body)
            best = candidate if best is None or candidate[1] < best[1] else best
        assert best is not None
        key = (kind, best[0], best[1])
        if key not in self._named:
            name = f"{kind} {len(self._named)}"
            parts = (best[3],) if kind == "max" else tuple(_factors(best[3])[1])
            depends = self.depends(best[3]) - {name_of(n) for n, _ in best[2]}
            self._sums[name] = NamedSum(kind, best[2], parts, height, depends)
            self._named[key] = z3.Real(name)
            if self.is_positive(self._named[key]):
                self.facts.append(self._named[key] > 0)
        return self._named[key]

    def _opened(self, named: NamedSum) -> tuple[list[Binding], list[Number]]:
        bounds = [(self.bound(), size) for _, size in named.bounds]
        swap = {name_of(old): new for (old, _), (new, _) in zip(named.bounds, bounds, strict=True)}
        return bounds, [self.renamed(f, swap) for f in named.factors]

    def renamed(self, number: Number, swap: dict[str, Number]) -> Number:
        """Return a number with indices replaced, also within sums."""
        renames = {name: new for name, new in swap.items() if name in self.depends(number)}
        if not renames:
            return number
        pairs = [(z3.Int(name), new) for name, new in renames.items()]
        for name in self._seen(number).sums:
            named = self._sums[name]
            if not named.depends.isdisjoint(renames):
                bounds, factors = self._opened(named)
                inner = [self.renamed(f, renames) for f in factors]
                inside = product_of(Fraction(1), inner)
                renamed_sum = self.greatest(bounds, inside) if named.kind == "max" else self.total(bounds, inside)
                pairs.append((z3.Real(name), renamed_sum))
        return z3.substitute(number, *pairs)

    def closed(self, number: Number) -> Number:
        """Return a number with its bound indices renamed by their first occurrence."""
        text = number.sexpr()
        bound = sorted((name for name in self.depends(number) if name[0] == "~"), key=lambda n: (text.find(n), n))
        return multiplied(self.renamed(number, {name: z3.Int(f"#bound {i}") for i, name in enumerate(bound)}))

    # ---- the indices of a number ----

    def depends(self, number: Number) -> frozenset[str]:
        """Return the indices in a number, including those of its sums."""
        return self._seen(number).indices

    def _seen(self, number: Number) -> _Seen:
        key = number.get_id()
        if key not in self._met:
            parts = list(map(self._seen, number.children())) or [self._leaf(number)]
            self._met[key] = _Seen(
                number,
                frozenset[str]().union(*(part.indices for part in parts)),
                frozenset[str]().union(*(part.sums for part in parts)),
                max(part.height for part in parts),
            )
        return self._met[key]

    def _leaf(self, number: Number) -> _Seen:
        name = number.decl().name()
        if name in self._sums:
            return _Seen(number, self._sums[name].depends, frozenset([name]), self._sums[name].height)
        return _Seen(number, frozenset([name] if name[:1] in INDEX else []))

    def _sum(self, number: Number) -> NamedSum | None:
        return None if number.num_args() else self._sums.get(number.decl().name())

    def is_positive(self, number: Number) -> bool:
        """Return whether a number is a size, an exponential, an existing root, or a nonempty sum of exponentials."""
        named = self._sum(number)
        if named is None:
            return (
                is_function(number, "exp")
                or is_function(number, "sqrt")
                or (z3.is_const(number) and number.decl().name().startswith("size "))
            )
        return (
            named.kind == "sum"
            and all(is_function(f, "exp") for f in named.factors)
            and all(self.nonempty(size) for _, size in named.bounds)
        )


def multiplied(number: Number) -> Number:
    """Return a number multiplied out by Z3, with its summands in canonical order."""
    return z3.simplify(number, som=True, sort_sums=True)


def is_function(number: Number, name: str) -> bool:
    """Return whether a number is this function of another."""
    return number.num_args() == 1 and number.decl().name() == name


def is_indicator(number: Number) -> bool:
    """Return whether a number is an indicator, 1 or 0 by a condition."""
    return number.num_args() > 0 and name_of(number).startswith("[")


def name_of(number: Number) -> str:
    """Return the name of a constant."""
    return number.decl().name()


def _kind(number: Number) -> int:
    return number.decl().kind()


def _factors(term: Number) -> RealProduct:
    coefficient, factors, pending = Fraction(1), list[Number](), [term]
    while pending:
        part = pending.pop()
        kind = _kind(part)
        if kind == z3.Z3_OP_ANUM:
            coefficient *= part.as_fraction()
        elif kind == z3.Z3_OP_MUL:
            pending += reversed(part.children())
        elif kind == z3.Z3_OP_POWER and z3.is_rational_value(part.arg(1)):
            pending += [part.arg(0)] * part.arg(1).numerator_as_long()
        else:
            factors.append(part)
    return coefficient, factors


def _orders(bounds: Sequence[Binding]) -> Iterator[tuple[Binding, ...]]:
    """Yield the orders of the bounds in which sizes ascend."""
    groups = [list(group) for _, group in groupby(sorted(bounds, key=_size), _size)]
    for parts in product(*map(permutations, groups)):
        yield tuple(bound for part in parts for bound in part)


def _size(bound: Binding) -> str:
    return str(bound[1])


def _cancel(factors: list[Number]) -> bool:
    """Drop pairs of u and inverse(u) from the list."""
    for f in factors if len(factors) > 1 else ():
        if is_function(f, "inverse"):
            inverted = f.arg(0)
            other = next((g for g in factors if g.eq(inverted)), None)
            if other is not None:
                factors[:] = _without(_without(factors, f), other)
                _cancel(factors)
                return True
    return False


def _without(factors: Sequence[Number], one: Number) -> list[Number]:
    at = next(i for i, f in enumerate(factors) if f.eq(one))
    return [*factors[:at], *factors[at + 1 :]]


def total_of(monomials: Sequence[RealProduct]) -> Number:
    """Return the sum of monomials."""
    return sum_of([product_of(c, factors) for c, factors in monomials])


def sum_of(terms: Sequence[Number]) -> Number:
    """Return the sum of terms; 0 if there are none."""
    return z3.Sum(list(terms)) if len(terms) > 1 else terms[0] if terms else z3.RealVal(0)


def product_of(coefficient: Fraction, factors: Sequence[Number]) -> Number:
    """Return coefficient · Π factors."""
    parts = [*([z3.RealVal(coefficient)] if coefficient != 1 or not factors else []), *factors]
    return z3.Product(parts) if len(parts) > 1 else parts[0]
