"""Normal forms: a tensor's element, written as a sum of products with bound summation indices.

    linear(add(x, y), w)[b, o]  =  Σ_i x[b, i]·w[o, i]  +  Σ_i y[b, i]·w[o, i]

A monomial has an integer coefficient, bound indices with their ranges, conditions (which piece of a concatenation an
index falls into), and atoms: cells of the rule's variables, or a nonlinear function of a normal form. Two normal forms
are equal if their monomials pair up, each pair equal under a bijection of its bound indices; every equality of indices
and of ranges is decided by Z3, case by case over the conditions on free indices.
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


@dataclass(frozen=True, eq=False)
class Function:
    """A nonlinear function of one element; `attrs` as text."""

    name: str
    argument: Normal


Atom = Cell | Function


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


def times(left: Normal, right: Normal) -> Normal:
    """The product, multiplied out."""
    return tuple(
        Monomial(a.coefficient * b.coefficient, a.bound + b.bound, a.conditions + b.conditions, a.atoms + b.atoms)
        for a, b in product(left, right)
    )


def scaled(normal: Normal, factor: int) -> Normal:
    """An integer multiple."""
    return tuple(replace(m, coefficient=m.coefficient * factor) for m in normal)


def summed(normal: Normal, index: Number, size: Number) -> Normal:
    """Σ_{index < size}."""
    return tuple(replace(m, bound=((index, size), *m.bound)) for m in normal)


def where(normal: Normal, condition: Formula) -> Normal:
    """The form where the condition holds, zero elsewhere."""
    return tuple(replace(m, conditions=(condition, *m.conditions)) for m in normal)


def applied(name: str, argument: Normal) -> Normal:
    """A nonlinear function of the element. Idempotent functions are applied once."""
    if name in IDEMPOTENT and len(argument) == 1 and _bare(argument[0], name):
        return argument
    return (Monomial(atoms=(Function(name, argument),)),)


IDEMPOTENT = frozenset({"relu"})


def _bare(monomial: Monomial, name: str) -> bool:
    atoms = monomial.atoms
    plain = monomial.coefficient == 1 and not monomial.bound and not monomial.conditions and len(atoms) == 1
    return plain and isinstance(atoms[0], Function) and atoms[0].name == name


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
        """The conditions that do not speak about bound indices, those inside functions included."""
        names = {str(index) for index, _ in monomial.bound}
        yield from (c for c in monomial.conditions if not names & _constants(c))
        for atom in monomial.atoms:
            if isinstance(atom, Function):
                for inner in atom.argument:
                    yield from (c for c in self._free_conditions(inner) if not names & _constants(c))

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
        if isinstance(left, Cell) and isinstance(right, Cell):
            if left.variable != right.variable:
                return False
            equal = [a == b for a, b in zip(left.index, right.index, strict=True)]
            return is_valid(z3.And(equal), self.given)
        if isinstance(left, Function) and isinstance(right, Function):
            return left.name == right.name and self.holds(left.argument, right.argument)
        return False


def _shape(atom: Atom) -> str:
    return f"cell {atom.variable}" if isinstance(atom, Cell) else f"function {atom.name}"


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
    if not swap:
        return atom
    if isinstance(atom, Cell):
        return Cell(atom.variable, tuple(z3.substitute(i, *swap) for i in atom.index))
    renamed = tuple(
        Monomial(
            m.coefficient,
            tuple((index, z3.substitute(size, *swap)) for index, size in m.bound),
            tuple(z3.substitute(c, *swap) for c in m.conditions),
            tuple(_atom_renamed(a, swap) for a in m.atoms),
        )
        for m in atom.argument
    )
    return Function(atom.name, renamed)
