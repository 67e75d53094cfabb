"""Real numbers with sums over indices, as Z3 expressions: the arithmetic of the second proof of serial rules.

A sum is a constant that stands for it: `Σ_i x[b, i]·w[o, i]` is "sum 3", and equal sums are one constant. Z3 multiplies
out what is summed (`simplify` with `som`); here, what does not depend on an index is put before its sum, sums within
sums are opened, and what is left is named. All other algebra is Z3's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count, permutations

from shardwright.pcg.errors import RuleError
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.polys import Atom, Poly

Bound = tuple[Number, Poly]
"""An index and how many values it takes."""
Monomial = tuple[Fraction, list[Number]]
MAX_BOUNDS = 4
INDEX = ("@", "~", "#")
"""How names of indices begin: free ones, bound ones, and bound ones of a sum that has a name."""


@dataclass(frozen=True, eq=False)
class Sum:
    """Σ over the bounds of a product, or the maximum of an expression, which is then the one factor."""

    kind: str
    bounds: tuple[Bound, ...]
    factors: tuple[Number, ...]
    height: int
    depends: frozenset[str]


@dataclass
class Sums:
    """The sums of one proof. `is_size` says what is at least 1."""

    is_size: Callable[[Atom], bool]
    facts: list[Formula] = field(default_factory=list)
    _sums: dict[str, Sum] = field(default_factory=dict)
    _named: dict[tuple[str, tuple[str, ...], str], Number] = field(default_factory=dict)
    _depends: dict[int, tuple[Number, frozenset[str], int]] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=count)

    # ---- products ----

    def monomials(self, number: Number) -> list[Monomial]:
        """The number multiplied out: coefficients and factors; u · inverse(u) is left out."""
        flat = multiplied(number)
        found = [_factors(term) for term in (flat.children() if z3.is_add(flat) else [flat])]
        if not any(_cancel(factors) for _, factors in found):
            return found
        return self.monomials(total_of(found))

    def flat(self, number: Number) -> Number:
        """The number in the one form that Z3 multiplies it out to."""
        return multiplied(total_of(self.monomials(number)))

    def size(self, value: Poly) -> Number:
        """A size as a real number."""
        terms = [z3.Product([z3.RealVal(c), *map(self._atom, atoms)]) for atoms, c in value.terms]
        return z3.Sum([z3.RealVal(0), *terms])

    def _atom(self, atom: Atom) -> Number:
        return z3.Real(f"size {atom}" if self.is_size(atom) else f"number {atom}")

    def nonempty(self, size: Poly) -> bool:
        return bool(size.terms) and all(c > 0 and all(map(self.is_size, atoms)) for atoms, c in size.terms)

    # ---- sums ----

    def bound(self) -> Number:
        """A new index."""
        return z3.Int(f"~{next(self._fresh)}")

    def total(self, bounds: Sequence[Bound], number: Number) -> Number:
        """Σ over the bounds."""
        return z3.Sum([z3.RealVal(0), *(self._summed(bounds, c, factors) for c, factors in self.monomials(number))])

    def _summed(self, bounds: Sequence[Bound], coefficient: Fraction, factors: Sequence[Number]) -> Number:
        outside, inside, inner = [z3.RealVal(coefficient)], list[Number](), {str(n): (n, size) for n, size in bounds}
        pending = list(factors)
        while pending:
            f = pending.pop()
            if self.depends(f).isdisjoint(inner):
                outside.append(f)
            elif (found := self._sum(f)) is not None and found.kind == "sum":
                opened, more = self._opened(found)
                inner |= {str(n): (n, size) for n, size in opened}
                pending += more
            else:
                inside.append(f)
        used = set[str]()
        for names, members in self._apart(inside, set(inner)):
            used |= names
            outside.append(self._name("sum", [inner[n] for n in sorted(names)], members))
        return z3.Product([*outside, *(self.size(size) for name, (_, size) in inner.items() if name not in used)])

    def _apart(self, factors: Sequence[Number], names: set[str]) -> list[tuple[set[str], list[Number]]]:
        """The factors in groups that share no index."""
        groups = list[tuple[set[str], list[Number]]]()
        for f in factors:
            own, members = set(self.depends(f)) & names, [f]
            for group in [g for g in groups if g[0] & own]:
                groups.remove(group)
                own, members = own | group[0], members + group[1]
            groups.append((own, members))
        return groups

    def greatest(self, bounds: Sequence[Bound], number: Number) -> Number:
        """The maximum over the bounds; what does not depend on them is put before it."""
        names = {str(n) for n, _ in bounds}
        outside, inside = list[Monomial](), list[Monomial]()
        for c, factors in self.monomials(number):
            free = all(self.depends(f).isdisjoint(names) for f in factors)
            (outside if free else inside).append((c, factors))
        if not inside:
            return number
        return total_of(outside) + self._name("max", list(bounds), [multiplied(total_of(inside))])

    def _name(self, kind: str, bounds: Sequence[Bound], factors: Sequence[Number]) -> Number:
        """The constant that stands for a sum, whatever the order and names of its indices."""
        if len(bounds) > MAX_BOUNDS:
            raise RuleError(f"a sum over {len(bounds)} indices")
        height = 1 + max(self._height(f) for f in factors)
        best: tuple[tuple[str, ...], str, tuple[Bound, ...], Number] | None = None
        for order in permutations(bounds):
            own = tuple((z3.Int(f"#{height}.{i}"), size) for i, (_, size) in enumerate(order))
            swap = {str(old): new for (old, _), (new, _) in zip(order, own, strict=True)}
            body = multiplied(self.renamed(z3.Product(list(factors)), swap))
            found = (tuple(str(size) for _, size in own), body.sexpr(), own, body)
            best = found if best is None or found[:2] < best[:2] else best
        assert best is not None
        key = (kind, best[0], best[1])
        if key not in self._named:
            name = f"{kind} {len(self._named)}"
            parts = (best[3],) if kind == "max" else tuple(_factors(best[3])[1])
            depends = self.depends(best[3]) - {str(n) for n, _ in best[2]}
            self._sums[name] = Sum(kind, best[2], parts, height, depends)
            self._named[key] = z3.Real(name)
            if self.is_positive(self._named[key]):
                self.facts.append(self._named[key] > 0)
        return self._named[key]

    def _opened(self, found: Sum) -> tuple[list[Bound], list[Number]]:
        bounds = [(self.bound(), size) for _, size in found.bounds]
        swap = {str(old): new for (old, _), (new, _) in zip(found.bounds, bounds, strict=True)}
        return bounds, [self.renamed(f, swap) for f in found.factors]

    def renamed(self, number: Number, swap: dict[str, Number]) -> Number:
        """The number with indices replaced, within sums too."""
        own = {name: new for name, new in swap.items() if name in self.depends(number)}
        if not own:
            return number
        pairs = [(z3.Int(name), new) for name, new in own.items()]
        for name in constants(number):
            found = self._sums.get(name)
            if found is not None and not found.depends.isdisjoint(own):
                bounds, factors = self._opened(found)
                inner = [self.renamed(f, own) for f in factors]
                again = (
                    self.greatest(bounds, inner[0]) if found.kind == "max" else self.total(bounds, z3.Product(inner))
                )
                pairs.append((z3.Real(name), again))
        return z3.substitute(number, *pairs)

    def closed(self, number: Number) -> Number:
        """The number with its bound indices called by where they occur."""
        text = number.sexpr()
        bound = sorted((name for name in self.depends(number) if name[0] == "~"), key=lambda n: (text.find(n), n))
        return multiplied(self.renamed(number, {name: z3.Int(f"#bound {i}") for i, name in enumerate(bound)}))

    # ---- what a number depends on ----

    def depends(self, number: Number) -> frozenset[str]:
        """The indices in a number, those of its sums included."""
        return self._seen(number)[1]

    def _height(self, number: Number) -> int:
        return self._seen(number)[2]

    def _seen(self, number: Number) -> tuple[Number, frozenset[str], int]:
        key = number.get_id()
        if key not in self._depends:
            names = constants(number)
            sums = [self._sums[name] for name in names if name in self._sums]
            indices = {name for name in names if name[0] in INDEX}.union(*(s.depends for s in sums))
            self._depends[key] = (number, frozenset(indices), max((s.height for s in sums), default=0))
        return self._depends[key]

    def _sum(self, number: Number) -> Sum | None:
        return None if number.num_args() else self._sums.get(number.decl().name())

    def is_positive(self, number: Number) -> bool:
        """Whether a number is a size, an exponential, or a sum of one or more."""
        found = self._sum(number)
        if found is None:
            return is_function(number, "exp") or (z3.is_const(number) and number.decl().name().startswith("size "))
        return (
            found.kind == "sum"
            and all(is_function(f, "exp") for f in found.factors)
            and all(self.nonempty(size) for _, size in found.bounds)
        )


def multiplied(number: Number) -> Number:
    """The number multiplied out by Z3, its summands in one order."""
    return z3.simplify(number, som=True, sort_sums=True)


def is_function(number: Number, name: str) -> bool:
    """Whether the number is this function of another."""
    return number.num_args() == 1 and number.decl().name() == name


def _factors(term: Number) -> Monomial:
    coefficient, factors, pending = Fraction(1), list[Number](), [term]
    while pending:
        part = pending.pop()
        if z3.is_rational_value(part):
            coefficient *= part.as_fraction()
        elif z3.is_mul(part):
            pending += reversed(part.children())
        elif z3.is_app_of(part, z3.Z3_OP_POWER) and z3.is_rational_value(part.arg(1)):
            pending += [part.arg(0)] * part.arg(1).numerator_as_long()
        else:
            factors.append(part)
    return coefficient, factors


def _cancel(factors: list[Number]) -> bool:
    """Drop pairs of u and inverse(u) from the list."""
    for f in factors:
        if is_function(f, "inverse"):
            other = next((g for g in factors if g.eq(f.arg(0))), None)
            if other is not None:
                factors[:] = _without(_without(factors, f), other)
                _cancel(factors)
                return True
    return False


def _without(factors: Sequence[Number], one: Number) -> list[Number]:
    at = next(i for i, f in enumerate(factors) if f.eq(one))
    return [*factors[:at], *factors[at + 1 :]]


def total_of(monomials: Sequence[Monomial]) -> Number:
    """The sum of monomials."""
    return z3.Sum([z3.RealVal(0), *(z3.Product([z3.RealVal(c), *factors]) for c, factors in monomials)])


def constants(number: Number) -> set[str]:
    """The names of the constants in a number."""
    found, pending, seen = set[str](), [number], set[int]()
    while pending:
        e = pending.pop()
        if e.get_id() in seen:
            continue
        seen.add(e.get_id())
        if e.num_args():
            pending += e.children()
        elif e.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            found.add(e.decl().name())
    return found
