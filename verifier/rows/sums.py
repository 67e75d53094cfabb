"""Sums of cells with Z3 indices: what the proofs of parallel operators compare.

A monomial is a sum over bound indices with ranges of a product of cells. Two normal forms are equal if their monomials
pair up, each pair equal under a bijection of its bound indices; every equality of indices and of ranges is decided by
Z3. Equations have normal forms of their own (`verifier/algebra/normal.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product

from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.solver import is_satisfiable, is_valid


@dataclass(frozen=True, eq=False)
class Cell:
    """An element of a variable."""

    variable: str
    index: tuple[Number, ...]


Atom = Cell


@dataclass(frozen=True, eq=False)
class Monomial:
    """coefficient · Σ_{bound, conditions} Π atoms. Every bound index runs over [0, size)."""

    coefficient: int = 1
    bound: tuple[tuple[Number, Number], ...] = ()
    conditions: tuple[Formula, ...] = ()
    atoms: tuple[Atom, ...] = ()

    @property
    def domain(self) -> list[Formula]:
        """The ranges of the bound indices and the conditions."""
        return [z3.And(index >= 0, index < size) for index, size in self.bound] + list(self.conditions)


Normal = tuple[Monomial, ...]


def summed(normal: Normal, index: Number, size: Number) -> Normal:
    """Σ_{index < size}."""
    return tuple(replace(m, bound=((index, size), *m.bound)) for m in normal)


@dataclass
class Equality:
    """Decides equality of normal forms under what is `given`; `shifts` are offsets that bound indices may differ by."""

    given: list[Formula]
    shifts: list[Number] = field(default_factory=list)

    def holds(self, left: Normal, right: Normal) -> bool:
        """Whether both forms are equal wherever `given` holds."""
        cases = [c for m in (*left, *right) for c in self._free_conditions(m)]
        return all(self._in_case(left, right, case) for case in self._cases(cases))

    def _free_conditions(self, monomial: Monomial) -> Iterator[Formula]:
        """The conditions that do not speak about bound indices."""
        names = {str(index) for index, _ in monomial.bound}
        yield from (c for c in monomial.conditions if not names & _constants(c))

    def _cases(self, conditions: Sequence[Formula]) -> Iterator[list[Formula]]:
        """Every consistent choice of truth values for the conditions."""
        distinct = list({str(z3.simplify(c)): c for c in conditions}.values())
        for signs in product((True, False), repeat=len(distinct)):
            case = [c if sign else z3.Not(c) for c, sign in zip(distinct, signs, strict=True)]
            if is_satisfiable([*self.given, *case]):
                yield case

    def _in_case(self, left: Normal, right: Normal, case: list[Formula]) -> bool:
        inner = Equality([*self.given, *case], self.shifts)
        ours, theirs = inner._live(left), inner._live(right)
        return len(ours) == len(theirs) and inner._paired(ours, theirs)

    def _live(self, normal: Normal) -> list[Monomial]:
        """The monomials that are not empty sums here, without conditions that always hold."""
        live: list[Monomial] = []
        for monomial in normal:
            if not is_satisfiable([*self.given, *monomial.domain]):
                continue
            ranges = replace(monomial, conditions=()).domain
            kept = [c for c in monomial.conditions if not is_valid(c, [*self.given, *ranges])]
            live.append(replace(monomial, conditions=tuple(kept)))
        return live

    def _paired(self, left: Sequence[Monomial], right: Sequence[Monomial]) -> bool:
        if not left:
            return not right
        first, rest = left[0], left[1:]
        return any(
            self._same(first, other) and self._paired(rest, [*right[:i], *right[i + 1 :]])
            for i, other in enumerate(right)
        )

    def _same(self, left: Monomial, right: Monomial) -> bool:
        if left.coefficient != right.coefficient or len(left.bound) != len(right.bound):
            return False
        if sorted(map(_shape, left.atoms)) != sorted(map(_shape, right.atoms)):
            return False
        ours = [index for index, _ in left.bound]
        for order in permutations(right.bound):
            for shift in product([z3.IntVal(0), *self.shifts], repeat=len(ours)):
                images = [mine + by for mine, by in zip(ours, shift, strict=True)]
                renamed = _renamed(right, [index for index, _ in order], images)
                if self._same_domain(left, renamed) and self._same_atoms(left, renamed.atoms):
                    return True
        return False

    def _same_domain(self, left: Monomial, right: Monomial) -> bool:
        return is_valid(z3.And(left.domain) == z3.And(right.domain), self.given)

    def _same_atoms(self, left: Monomial, right: Sequence[Atom]) -> bool:
        inner = Equality([*self.given, *left.domain], self.shifts)
        return any(
            all(inner._same_atom(a, b) for a, b in zip(left.atoms, order, strict=True)) for order in permutations(right)
        )

    def _same_atom(self, left: Atom, right: Atom) -> bool:
        if left.variable != right.variable:
            return False
        equal = [a == b for a, b in zip(left.index, right.index, strict=True)]
        return is_valid(z3.And(equal), self.given)


def _shape(atom: Atom) -> str:
    return atom.variable


def _constants(formula: Formula) -> set[str]:
    """The names of the constants in a formula."""
    if z3.is_const(formula):
        return {str(formula)}
    return set().union(*(_constants(child) for child in formula.children()))


def _renamed(monomial: Monomial, names: Sequence[Number], images: Sequence[Number]) -> Monomial:
    """The monomial with each bound index, in this order, written as its image."""
    swap = list(zip(names, images, strict=True))
    sizes = {str(index): size for index, size in monomial.bound}
    bound = tuple((image, sizes[str(name)]) for name, image in swap)
    conditions = tuple(z3.substitute(c, *swap) for c in monomial.conditions) if swap else monomial.conditions
    return Monomial(monomial.coefficient, bound, conditions, tuple(_atom_renamed(a, swap) for a in monomial.atoms))


def _atom_renamed(atom: Atom, swap: list[tuple[Number, Number]]) -> Atom:
    return Cell(atom.variable, tuple(z3.substitute(i, *swap) for i in atom.index)) if swap else atom
