"""Normal forms: a tensor's element as a sum of products, so that equal elements are equal objects.

    linear(add(x, y), w)[b, o]  =  Σ_i x[b, i]·w[o, i]  +  Σ_i y[b, i]·w[o, i]

A *normal form* is a sum of monomials with rational coefficients; a *monomial* a product of powers of factors:

    cell     an element of a variable                    size     a size, which is at least 1 unless it says otherwise
    sum      Σ over bound indices of a monomial          exp      exp of a normal form
    max      the greatest of a family of normal forms    poly     a normal form of several monomials, in a power
    sqrt     the square root of a normal form, which may not exist, and other functions of normal forms
    in       1 where a position is within [0, n), else 0   ge       1 where an integer is at least 0, else 0

Factors are interned: one object for one value, whatever its bound indices were called. Products of sums are multiplied
out and split again into sums that share no index; what does not depend on an index stands before its sum. Exponents
of one factor are added, but `x · 1/x` is only cancelled where x is known not to be 0 and to exist everywhere: see
`Factor.nonzero` and `Factor.total`. A monomial that cancels to 0 is kept, with coefficient 0, unless it is total: both
sides of a rule exist for the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count, permutations, product
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.verifier.polys import App, Atom, Poly, applied, poly

Exponent = int | Fraction
Monomial = tuple[tuple["Factor", Exponent], ...]
Normal = tuple[tuple[Monomial, Fraction], ...]
Bound = tuple[str, Poly]
Payload = Poly | str | Monomial | Normal | tuple["Payload", ...] | App

ZERO: Normal = ()
ONE: Normal = (((), Fraction(1)),)
MAX_ORDERS = 720
INDICATORS = ("in", "same", "ge")


@dataclass(frozen=True, eq=False, slots=True)
class Factor:
    """One factor. `names` are the indices it depends on; the flags hold wherever it exists.

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
        """Whether it may be cancelled: it exists everywhere and is not 0."""
        return self.positive and self.total

    def __str__(self) -> str:
        return f"{self.kind}{self.number}"


@dataclass
class Forms:
    """The factors of one proof.

    is_size     says which names and applications are at least 1
    in_range    (condition, function, n): where the condition on a value is 1, the value is in [0, n)
    exists      the forms are of a term that has a value, so that what may be cancelled is not 0 and exists
    known       factors that are not 0 and exist, because the other side divides by them
    """

    is_size: Callable[[Atom], bool] = lambda atom: isinstance(atom, str)
    in_range: set[tuple[str, str, Poly]] = field(default_factory=set)
    exists: bool = False
    known: frozenset[Factor] = frozenset()
    _made: dict[tuple[object, ...], Factor] = field(default_factory=dict)
    _renamed: dict[tuple[Factor, tuple[Bound, ...]], Normal] = field(default_factory=dict)
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
    ) -> Factor:
        """The one factor of this kind and these parts."""
        key = (kind, parts)
        if key not in self._made:
            seen = frozenset().union(*map(_names, parts)) if names is None else names
            inner = max((f.height for part in parts for f in _factors(part)), default=0)
            self._made[key] = Factor(
                kind, parts, len(self._made), seen, max(height, inner), positive, positive or nonnegative, total
            )
        return self._made[key]

    def fresh(self) -> str:
        """A new bound index."""
        return f"~{next(self._fresh)}"

    def cell(self, variable: str, index: Sequence[Poly]) -> Normal:
        """An element of a variable."""
        return of(self.factor("cell", variable, tuple(index)))

    def number(self, value: Fraction | int) -> Normal:
        return (((), Fraction(value)),) if value else ZERO

    def size(self, value: Poly) -> Normal:
        """A size as a number: its names are factors, which are positive where they are sizes."""
        found: Normal = ZERO
        for atoms, coefficient in value.terms:
            term = self.number(coefficient)
            for atom in atoms:
                known = self.is_size(atom)
                payload = Poly((((atom,), 1),))
                term = self.times(term, of(self.factor("size", payload, positive=known)))
            found = self.add(found, term)
        return found

    def indicator(self, kind: str, *parts: Poly) -> Normal:
        """1 where a condition on positions holds, else 0."""
        return of(self.factor(kind, *parts, nonnegative=True))

    # ---- sums and products ----

    def add(self, *normals: Normal) -> Normal:
        total: dict[Monomial, Fraction] = {}
        for normal in normals:
            for monomial, coefficient in normal:
                total[monomial] = total.get(monomial, Fraction(0)) + coefficient
        return _sorted((m, c) for m, c in total.items() if c or not self._surely(m))

    def scaled(self, normal: Normal, by: Fraction | int) -> Normal:
        if not by:
            return _sorted((m, Fraction(0)) for m, _ in normal if not self._surely(m))
        return tuple((m, c * by) for m, c in normal)

    def times(self, left: Normal, right: Normal) -> Normal:
        """The product, multiplied out."""
        if left == ONE:
            return right
        if right == ONE:
            return left
        if not left or not right:  # 0 · u exists where u does
            return self.scaled(left or right, 0)
        parts = [self.scaled(self.monomial((*a, *b)), c * d) for (a, c), (b, d) in product(left, right)]
        return self.add(*parts) if len(parts) != 1 else parts[0]

    def monomial(self, factors: Iterable[tuple[Factor, Exponent]]) -> Normal:
        """A product of powers, with exponents added; powers that can be written out are."""
        powers: dict[tuple[Factor, bool], Exponent] = {}
        exponents: list[Normal] = []
        for f, e in factors:
            if f.kind == "exp":
                exponents.append(self.scaled(_normal(f.parts[0]), Fraction(e)))
            else:
                key = (f, not self._cancels(f) and e < 0)
                powers[key] = powers.get(key, 0) + e
        written: list[Normal] = []
        kept: list[tuple[Factor, Exponent]] = []
        if exponents:
            ones = {f for f, _ in powers if f.kind in INDICATORS}
            kept += self._exponential(self._where(ones, self.add(*exponents)))
        for (f, _), e in powers.items():
            if f.kind == "in" and self._implied(f, powers):
                continue
            if (power := self._written_out(f, e)) is not None:
                written.append(power)
            elif e:
                kept.append((f, 1 if f.kind in INDICATORS and e > 1 else _integral(e)))
        found: Normal = ((tuple(sorted(kept, key=_power_order)), Fraction(1)),)
        for part in written:
            found = self.times(found, part)
        return found

    def _written_out(self, f: Factor, e: Exponent) -> Normal | None:
        """A power that is a form of other factors: of a sum, |u|², relu(u)² = u·relu(u), √u·√u where it exists."""
        if e < 1 or e != int(e):
            return None
        if f.kind == "poly":
            return self.to_the(_normal(f.parts[0]), int(e))
        if f.kind == "abs" and e >= 2:
            square = self.to_the(_normal(f.parts[0]), int(e) - int(e) % 2)
            return self.times(square, of(f) if e % 2 else ONE)
        if f.kind == "sqrt" and self.exists and e == 2:
            return _normal(f.parts[0])
        if f.kind == "fn relu" and e >= 2:
            return self.times(of(f), self.to_the(_normal(f.parts[0]), int(e) - 1))
        return None

    def _exponential(self, argument: Normal) -> list[tuple[Factor, Exponent]]:
        return [(self.exponential(argument), 1)] if argument else []

    def _cancels(self, f: Factor) -> bool:
        return self.exists or f.nonzero or f in self.known

    def _surely(self, monomial: Monomial) -> bool:
        """Whether the product exists, for all tensors or because the other side does."""
        return self.exists or all((f.total and (e >= 0 or f.positive)) or f in self.known for f, e in monomial)

    def assume(self, normal: Normal) -> None:
        """The form exists: what it divides by is not 0, unless an indicator says that it is not looked at.

        What holds for all bound indices is not used.
        """
        read = [m for m, _ in normal if not any(f.kind in INDICATORS for f, _ in m)]
        self.known = frozenset(f for m in read for f, e in m if e < 0)
        self._renamed.clear()

    def _implied(self, inside: Factor, others: Iterable[tuple[Factor, bool]]) -> bool:
        """Whether another indicator of the product says that the value is within its range."""
        if not self.in_range:
            return False
        value, size = inside.parts
        conditions = (applied(f.parts[0]) for f, _ in others if f.kind == "same")  # type: ignore[arg-type]
        own = applied(value)  # type: ignore[arg-type]
        return own is not None and any(
            c is not None and c.args == (value,) and (c.name, own.name, size) in self.in_range for c in conditions
        )

    def _where(self, ones: set[Factor], normal: Normal) -> Normal:
        """The form where these indicators are 1: c·exp(u) depends on u there only."""
        if not any(f in ones for m, _ in normal for f, _ in m):
            return normal
        parts = (((tuple((f, e) for f, e in m if f not in ones), c),) for m, c in normal)
        return self.add(*parts)

    def exponential(self, argument: Normal) -> Factor:
        return self.factor("exp", argument, positive=True, total=total_normal(argument))

    def to_the(self, normal: Normal, exponent: int) -> Normal:
        """A power with an exponent of 0 or more."""
        found = ONE
        for _ in range(exponent):
            found = self.times(found, normal)
        return found

    # ---- sums over indices ----

    def sum_over(self, normal: Normal, bounds: Sequence[Bound]) -> Normal:
        """Σ over the bound indices, each over [0, size)."""
        return self.add(*(self.scaled(self._summed(m, bounds), c) for m, c in normal)) if bounds else normal

    def _summed(self, monomial: Monomial, bounds: Sequence[Bound]) -> Normal:
        outside, pieces, inner = self._pieces(monomial, dict(bounds))
        found = self.monomial(outside)
        for names, members in _components(pieces, inner):
            found = self.times(found, self._closed_sum([(n, inner[n]) for n in names], members))
        used = {name for piece in pieces for name in piece[0].names}
        for name, size in inner.items():
            if name not in used:
                found = self.times(found, self.size(size))
        return found

    def _pieces(
        self, monomial: Monomial, bounds: dict[str, Poly]
    ) -> tuple[list[tuple[Factor, Exponent]], list[tuple[Factor, Exponent]], dict[str, Poly]]:
        """The factors without bound indices; the others, with sums opened and exponentials in parts; all bounds."""
        outside: list[tuple[Factor, Exponent]] = []
        pieces: list[tuple[Factor, Exponent]] = []
        pending, inner = list(monomial), dict(bounds)
        while pending:
            f, e = pending.pop()
            if f.names.isdisjoint(inner):
                outside.append((f, e))
            elif f.kind == "sum" and e > 0 and e == int(e):
                opened, body = self.opened(f)
                inner.update(opened)
                pending += [*body, *([(f, e - 1)] if e > 1 else [])]
            elif f.kind == "exp" and len(argument := _normal(f.parts[0])) > 1:
                pending += [(self.exponential((term,)), 1) for term in argument]
            else:
                pieces.append((f, e))
        return outside, pieces, inner

    def _closed_sum(self, bounds: list[Bound], members: list[tuple[Factor, Exponent]]) -> Normal:
        found: list[Normal] = []
        for monomial, coefficient in self.monomial(members):
            sizes, body = self._closed(bounds, ((monomial, Fraction(1)),))
            if len(body) != 1:
                raise RuleError("a product that becomes a sum when its indices are renamed")
            inner, sign = body[0]
            nonempty = all(self.is_positive(size) for size in sizes)
            positive = nonempty and all(f.positive for f, _ in inner)
            f = self.factor(
                "sum", sizes, inner, positive=positive, nonnegative=all(nonnegative_power(f, e) for f, e in inner),
                total=total_monomial(inner), height=1 + max(f.height for f, _ in inner), names=_open(inner),
            )  # fmt: skip
            found.append(self.scaled(of(f), coefficient * sign))
        return self.add(*found)

    def opened(self, f: Factor) -> tuple[list[Bound], Monomial]:
        """A sum's bound indices under new names, and its monomial."""
        sizes, body = f.parts
        normal, bounds = self._with_new_names(f.height, sizes, ((body, Fraction(1)),))  # type: ignore[arg-type]
        if len(normal) != 1 or normal[0][1] != 1:
            raise RuleError("a product that becomes a sum when its indices are renamed")
        return bounds, normal[0][0]

    def _with_new_names(self, height: int, sizes: Sequence[Poly], body: Normal) -> tuple[Normal, list[Bound]]:
        bounds = [(self.fresh(), size) for size in sizes]
        swap = {f"#{height}.{i}": poly(name) for i, (name, _) in enumerate(bounds)}
        return self.renamed(body, swap), bounds

    def is_positive(self, size: Poly) -> bool:
        """Whether a size is at least 1, every name in it being so."""
        return bool(size.terms) and all(c > 0 and all(map(self.is_size, atoms)) for atoms, c in size.terms)

    def _closed(self, bounds: Sequence[Bound], body: Normal) -> tuple[tuple[Poly, ...], Normal]:
        """The body with its bound indices in one order, under the names that closed forms use."""
        height = 1 + max((f.height for m, _ in body for f, _ in m), default=0)
        groups: dict[tuple[str, ...], list[Bound]] = {}
        for bound in bounds:
            groups.setdefault((str(bound[1]), *self._role(bound[0], body)), []).append(bound)
        ordered = [groups[key] for key in sorted(groups)]
        best: tuple[tuple[Poly, ...], Normal] | None = None
        orders = product(*(permutations(group) for group in ordered))
        for number, order in enumerate(orders):
            if number >= MAX_ORDERS:
                raise RuleError(f"a sum over {len(bounds)} alike indices: too many orders to compare")
            flat = [bound for group in order for bound in group]
            swap = {name: poly(f"#{height}.{i}") for i, (name, _) in enumerate(flat)}
            candidate = (tuple(size for _, size in flat), self.renamed(body, swap))
            if best is None or _normal_order(candidate[1]) < _normal_order(best[1]):
                best = candidate
        assert best is not None
        return best

    def _role(self, name: str, body: Normal) -> tuple[str, ...]:
        """Where an index occurs, whatever it and the others are called: indices of different roles need no orders."""
        swap = {other: poly("#other") for m, _ in body for f, _ in m for other in f.names if other[0] in "~#"}
        swap[name] = poly("#this")
        return tuple(sorted(f"{c} {' '.join(_text(f, e, swap) for f, e in m)}" for m, c in body))

    # ---- renaming ----

    def renamed(self, normal: Normal, swap: Mapping[str, Poly]) -> Normal:
        """The form with indices replaced, all at once."""
        if all(f.names.isdisjoint(swap) for m, _ in normal for f, _ in m):
            return normal
        parts: list[Normal] = []
        for monomial, coefficient in normal:
            same = [(f, e) for f, e in monomial if f.names.isdisjoint(swap)]
            part = (
                self.scaled(((tuple(same), Fraction(1)),), coefficient)
                if coefficient
                else ((tuple(same), coefficient),)
            )
            for f, e in monomial:
                if not f.names.isdisjoint(swap):
                    part = _merged(self, part, self._power_renamed(f, e, swap))
            parts.append(part)
        return self.add(*parts)

    def _power_renamed(self, f: Factor, e: Exponent, swap: Mapping[str, Poly]) -> Normal:
        key = (f, tuple(sorted((n, p) for n, p in swap.items() if n in f.names)))
        if key not in self._renamed:
            self._renamed[key] = self._factor_renamed(f, swap)
        return self.raised(self._renamed[key], e)

    def _factor_renamed(self, f: Factor, swap: Mapping[str, Poly]) -> Normal:
        if f.kind == "sum":
            bounds, monomial = self.opened(f)
            return self.sum_over(self.renamed(((monomial, Fraction(1)),), swap), bounds)
        if f.kind == "max":
            alternatives = [self.opened_alternative(a) for a in f.parts]
            return self.maximum([(b, self.renamed(n, swap)) for b, n in alternatives])
        parts = tuple(self._payload_renamed(part, swap) for part in f.parts)
        return self.rebuilt(f, parts)

    def rebuilt(self, f: Factor, parts: tuple[Payload, ...]) -> Normal:
        """A factor like f of other parts; the laws of functions apply again (verifier/laws.py)."""
        return of(self.factor(f.kind, *parts, positive=f.positive, nonnegative=f.nonnegative, total=f.total))

    def raised(self, normal: Normal, exponent: Exponent) -> Normal:
        """A power; see verifier/laws.py for exponents that are not natural numbers."""
        if exponent < 0 or exponent != int(exponent):
            raise RuleError(f"the power {exponent} of a normal form")
        return self.to_the(normal, int(exponent))

    def maximum(self, alternatives: Sequence[tuple[Sequence[Bound], Normal]]) -> Normal:
        return of(self.closed_max(alternatives))

    def _payload_renamed(self, part: Payload, swap: Mapping[str, Poly]) -> Payload:
        if isinstance(part, Poly):
            return part.put(swap)
        if isinstance(part, str | App) or not part:
            return part
        if isinstance(part[0], Poly):
            return tuple(p.put(swap) for p in part)  # type: ignore[union-attr]
        return self.renamed(part, swap)  # type: ignore[arg-type]

    # ---- maxima ----

    def opened_alternative(self, alternative: Payload) -> tuple[list[Bound], Normal]:
        sizes, body = alternative  # type: ignore[misc]
        if not sizes:
            return [], body  # type: ignore[return-value]
        renamed, bounds = self._with_new_names(self.max_height(body), sizes, body)  # type: ignore[arg-type]
        return bounds, renamed

    @staticmethod
    def max_height(body: Normal) -> int:
        """The height that a closed form's own indices are named by."""
        return 1 + max((f.height for m, _ in body for f, _ in m), default=0)

    def closed_max(self, alternatives: Iterable[tuple[Sequence[Bound], Normal]]) -> Factor:
        """The maximum of families, each over its bound indices."""
        closed = {self._closed(bounds, body) if bounds else ((), body) for bounds, body in alternatives}
        ordered = tuple(sorted(closed, key=lambda a: (_normal_order(a[1]), str([str(s) for s in a[0]]))))
        bodies = [body for _, body in ordered]
        total = all(map(total_normal, bodies))
        names = frozenset().union(*(_open(m) for body in bodies for m, _ in body))
        return self.factor("max", *ordered, total=total, height=max(map(self.max_height, bodies)), names=names)


def _merged(forms: Forms, left: Normal, right: Normal) -> Normal:
    """The product where no factor of one side is a factor of the other; coefficients of 0 are kept."""
    return tuple((m, c * d * x) for (a, c), (b, d) in product(left, right) for m, x in forms.monomial((*a, *b)))


def of(f: Factor) -> Normal:
    """The factor itself as a normal form."""
    return ((((f, 1),), Fraction(1)),)


def _normal(part: Payload) -> Normal:
    return part  # type: ignore[return-value]


def _integral(e: Exponent) -> Exponent:
    return int(e) if e == int(e) else e


def _power_order(power: tuple[Factor, Exponent]) -> tuple[int, Exponent]:
    return power[0].number, power[1]


def _monomial_order(monomial: Monomial) -> tuple[tuple[int, Exponent], ...]:
    return tuple(map(_power_order, monomial))


def _normal_order(normal: Normal) -> tuple[object, ...]:
    return tuple((_monomial_order(m), c) for m, c in normal)


def _sorted(items: Iterable[tuple[Monomial, Fraction]]) -> Normal:
    found = list(items)
    return tuple(sorted(found, key=lambda item: _monomial_order(item[0])) if len(found) > 1 else found)


def total_monomial(monomial: Monomial) -> bool:
    """Whether the product exists for all tensors."""
    return all(f.total and (e >= 0 or f.positive) for f, e in monomial)


def nonnegative_power(f: Factor, e: Exponent) -> bool:
    """Whether a power is at least 0 wherever it exists."""
    return f.nonnegative or e % 2 == 0


def _names(part: Payload) -> frozenset[str]:
    """The indices that a payload depends on."""
    if isinstance(part, Poly):
        return part.indices
    if isinstance(part, str | App):
        return frozenset()
    if isinstance(part, Factor):
        return part.names
    inner: tuple[Any, ...] = part if isinstance(part, tuple) else ()
    return frozenset().union(*map(_names, inner))


def _factors(part: object) -> Iterator[Factor]:
    if isinstance(part, Factor):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from _factors(inner)


def total_normal(normal: Normal) -> bool:
    """Whether the sum exists for all tensors."""
    return all(total_monomial(m) for m, _ in normal)


def _open(monomial: Monomial) -> frozenset[str]:
    """The free indices of a closed body."""
    own = 1 + max((f.height for f, _ in monomial), default=0)
    names = frozenset().union(*(f.names for f, _ in monomial))
    return frozenset(n for n in names if not n.startswith(f"#{own}."))


def _components(
    pieces: Sequence[tuple[Factor, Exponent]], bounds: Mapping[str, Poly]
) -> Iterator[tuple[list[str], list[tuple[Factor, Exponent]]]]:
    """The pieces in groups that share no bound index, each with its indices."""
    groups: list[tuple[set[str], list[tuple[Factor, Exponent]]]] = []
    for f, e in pieces:
        names, members = set(f.names & bounds.keys()), [(f, e)]
        apart = []
        for group in groups:
            if group[0] & names:
                names |= group[0]
                members = [*group[1], *members]
            else:
                apart.append(group)
        groups = [*apart, (names, members)]
    for names, members in groups:
        yield sorted(names), members


def _text(f: Factor, e: Exponent, swap: Mapping[str, Poly]) -> str:
    """A factor with its indices called what `swap` says; sums and maxima by their kind and indices alone."""
    if f.kind == "cell":
        return f"{f.parts[0]}[{', '.join(str(p.put(swap)) for p in f.parts[1])}]^{e}"  # type: ignore[union-attr]
    seen = sorted(str(swap.get(name, name)) for name in f.names)
    return f"{f.kind}{seen}^{e}"
