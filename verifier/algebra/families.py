"""Normal forms with bound indices: sums and maxima over them, and their renaming.

A sum is split into sums that share no index, and factors that do not depend on an index stand before its sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations, product

from shardwright.pcg.errors import RuleError
from shardwright.verifier.algebra.monomials import (
    Bound,
    Exponent,
    Monomial,
    Normal,
    NormalFactor,
    Payload,
    argument_of,
    nonnegative_power,
    normal_order,
    of,
    total_monomial,
    total_normal,
)
from shardwright.verifier.algebra.normal import Forms
from shardwright.verifier.algebra.polys import App, Poly, poly

MAX_ORDERS = 720


@dataclass
class Families(Forms):
    """Normal forms with sums and maxima over bound indices."""

    # ---- sums over indices ----

    def sum_over(self, normal: Normal, bounds: Sequence[Bound]) -> Normal:
        """Return Σ over the bound indices, each over [0, size)."""
        if not bounds:
            return normal
        self.noted(len(normal) > 1 or any(c != 1 for _, c in normal), "linear-sum")
        return self.add(*(self.scaled(self._summed(m, bounds), c) for m, c in normal))

    def _summed(self, monomial: Monomial, bounds: Sequence[Bound]) -> Normal:
        free_factors, pieces, inner = self._pieces(monomial, dict(bounds))
        groups = list(_components(pieces, inner))
        self.noted(bool(free_factors) or len(groups) > 1, "linear-sum")
        sums = (self._closed_sum([(n, inner[n]) for n in names], members) for names, members in groups)
        used = {name for piece in pieces for name in piece[0].names}
        free = (self.size(size) for name, size in inner.items() if self.noted(name not in used, "constant-sum"))
        return self.product(self.monomial(free_factors), *sums, *free)

    def _pieces(
        self, monomial: Monomial, bounds: dict[str, Poly]
    ) -> tuple[list[tuple[NormalFactor, Exponent]], list[tuple[NormalFactor, Exponent]], dict[str, Poly]]:
        """Return factors without bound indices; the others, with sums opened and exponentials in parts; all bounds."""
        free_factors: list[tuple[NormalFactor, Exponent]] = []
        pieces: list[tuple[NormalFactor, Exponent]] = []
        pending, inner = list(monomial), dict(bounds)
        while pending:
            f, e = pending.pop()
            if f.names.isdisjoint(inner):
                free_factors.append((f, e))
            elif f.kind == "sum" and e > 0 and e == int(e):
                opened, body = self.opened(f)
                self.used.update(("linear-sum", "exchange-sum"))
                inner.update(opened)
                pending += [*body, *([(f, e - 1)] if e > 1 else [])]
            elif f.kind == "exp" and len(argument := argument_of(f)) > 1:
                self.used.add("exp")
                pending += [(self.exponential((term,)), 1) for term in argument]
            else:
                pieces.append((f, e))
        return free_factors, pieces, inner

    def _closed_sum(self, bounds: list[Bound], members: list[tuple[NormalFactor, Exponent]]) -> Normal:
        terms: list[Normal] = []
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
            terms.append(self.scaled(of(f), coefficient * sign))
        return self.add(*terms)

    def opened(self, f: NormalFactor) -> tuple[list[Bound], Monomial]:
        """Return a sum's bound indices under new names, and its monomial."""
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
        """Return whether a size is at least 1 because every name in it is."""
        return bool(size.terms) and all(c > 0 and all(map(self.is_size, atoms)) for atoms, c in size.terms)

    def _closed(self, bounds: Sequence[Bound], body: Normal) -> tuple[tuple[Poly, ...], Normal]:
        """Return the body with its bound indices in a canonical order, under the names that closed forms use."""
        height = _height(body)
        groups: dict[tuple[str, ...], list[Bound]] = {}
        for bound in bounds:
            groups.setdefault((str(bound[1]), *self._role(bound[0], body)), []).append(bound)
        ordered = [groups[key] for key in sorted(groups)]
        best: tuple[tuple[Poly, ...], Normal] | None = None
        best_at = 0
        orders = product(*(permutations(group) for group in ordered))
        for number, order in enumerate(orders):
            if number >= MAX_ORDERS:
                raise RuleError(f"a sum over {len(bounds)} alike indices: too many orders to compare")
            flat = [bound for group in order for bound in group]
            swap = {name: poly(f"#{height}.{i}") for i, (name, _) in enumerate(flat)}
            candidate = (tuple(size for _, size in flat), self.renamed(body, swap))
            if best is None or normal_order(candidate[1]) < normal_order(best[1]):
                best, best_at = candidate, number
        assert best is not None
        self.noted(best[0] != tuple(size for _, size in bounds) or best_at > 0, "exchange-sum")
        return best

    def _role(self, name: str, body: Normal) -> tuple[str, ...]:
        """Return the occurrences of an index, independent of names; indices of different roles are not permuted."""
        swap = {other: poly("#other") for m, _ in body for f, _ in m for other in f.names if other[0] in "~#"}
        swap[name] = poly("#this")
        return tuple(sorted(f"{c} {' '.join(_text(f, e, swap) for f, e in m)}" for m, c in body))

    # ---- renaming ----

    def renamed(self, normal: Normal, swap: Mapping[str, Poly]) -> Normal:
        """Return the form with indices replaced, all at once."""
        if all(f.names.isdisjoint(swap) for m, _ in normal for f, _ in m):
            return normal
        parts: list[Normal] = []
        for monomial, coefficient in normal:
            same = [(f, e) for f, e in monomial if f.names.isdisjoint(swap)]
            part: Normal = ((tuple(same), coefficient),)
            for f, e in monomial:
                if not f.names.isdisjoint(swap):
                    part = _merged(self, part, self._power_renamed(f, e, swap))
            parts.append(part)
        return self.add(*parts)

    def _power_renamed(self, f: NormalFactor, e: Exponent, swap: Mapping[str, Poly]) -> Normal:
        key = (f, tuple(sorted((n, p) for n, p in swap.items() if n in f.names)))
        if key not in self._renamed:
            self._renamed[key] = self._factor_renamed(f, swap)
        return self.raised(self._renamed[key], e)

    def _factor_renamed(self, f: NormalFactor, swap: Mapping[str, Poly]) -> Normal:
        if f.kind == "sum":
            bounds, monomial = self.opened(f)
            return self.sum_over(self.renamed(((monomial, Fraction(1)),), swap), bounds)
        if f.kind == "max":
            alternatives = [self.opened_alternative(a) for a in f.parts]
            return self.maximum([(b, self.renamed(n, swap)) for b, n in alternatives])
        return self.rebuilt(f, tuple(self._payload_renamed(part, swap) for part in f.parts))

    def rebuilt(self, f: NormalFactor, parts: tuple[Payload, ...]) -> Normal:
        """Return a factor like f with other parts; the laws of functions apply again (verifier/algebra/laws.py)."""
        return of(self.factor(f.kind, *parts, positive=f.positive, nonnegative=f.nonnegative, total=f.total))

    def raised(self, normal: Normal, exponent: Exponent) -> Normal:
        """Return a power; see verifier/algebra/powers.py for exponents that are not natural numbers."""
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
        renamed, bounds = self._with_new_names(_height(body), sizes, body)  # type: ignore[arg-type]
        return bounds, renamed

    def closed_max(self, alternatives: Iterable[tuple[Sequence[Bound], Normal]]) -> NormalFactor:
        """Return the maximum of families, each over its bound indices."""
        given = [self._closed(bounds, body) if bounds else ((), body) for bounds, body in alternatives]
        closed = set(given)
        self.noted(len(closed) < len(given), "max-of-equal")
        self.noted(len(closed) > 1, "max-commutes")
        ordered = tuple(sorted(closed, key=lambda a: (normal_order(a[1]), str([str(s) for s in a[0]]))))
        bodies = [body for _, body in ordered]
        total = all(map(total_normal, bodies))
        names = frozenset().union(*(_open(m) for body in bodies for m, _ in body))
        return self.factor("max", *ordered, total=total, height=max(map(_height, bodies)), names=names)


def _merged(forms: Forms, left: Normal, right: Normal) -> Normal:
    """Return the product of forms without common factors; coefficients of 0 are kept."""
    return tuple((m, c * d * x) for (a, c), (b, d) in product(left, right) for m, x in forms.monomial((*a, *b)))


def _height(body: Normal) -> int:
    """Return the height by which a closed form's own indices are named."""
    return 1 + max((f.height for m, _ in body for f, _ in m), default=0)


def _open(monomial: Monomial) -> frozenset[str]:
    """Return the free indices of a closed body."""
    prefix = f"#{_height(((monomial, Fraction(1)),))}."
    return frozenset(n for f, _ in monomial for n in f.names if not n.startswith(prefix))


def _components(
    pieces: Sequence[tuple[NormalFactor, Exponent]], bounds: Mapping[str, Poly]
) -> Iterator[tuple[list[str], list[tuple[NormalFactor, Exponent]]]]:
    """Yield the pieces in groups that share no bound index, each with its indices."""
    groups: list[tuple[set[str], list[tuple[NormalFactor, Exponent]]]] = []
    for f, e in pieces:
        names, members = set(f.names & bounds.keys()), [(f, e)]
        disjoint = []
        for group in groups:
            if group[0] & names:
                names |= group[0]
                members = [*group[1], *members]
            else:
                disjoint.append(group)
        groups = [*disjoint, (names, members)]
    for names, members in groups:
        yield sorted(names), members


def _text(f: NormalFactor, e: Exponent, swap: Mapping[str, Poly]) -> str:
    """Return the text of a factor with its indices renamed; sums and maxima by their kind and indices alone."""
    if f.kind == "cell":
        return f"{f.parts[0]}[{', '.join(str(p.put(swap)) for p in f.parts[1])}]^{e}"  # type: ignore[union-attr]
    seen = sorted(str(swap.get(name, name)) for name in f.names)
    return f"{f.kind}{seen}^{e}"
