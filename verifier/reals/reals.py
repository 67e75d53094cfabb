"""Elements of terms as real numbers, for the second proof of serial rules.

A term's element at an index is a Z3 expression over the elements of the variables. Dims are those of the first proof.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from itertools import product

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply, Term, Variable
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import Dim, Evaluator
from shardwright.verifier.algebra.polys import Poly
from shardwright.verifier.algebra.symbols import translated
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.reals.numbers import RealNumbers
from shardwright.verifier.reals.numbersums import Binding, name_of, sum_of
from shardwright.verifier.solver import is_valid

Place = tuple[Number, ...]
Address = tuple[Place, ...]
"""A position along every dimension, with one number per digit."""


Segments = tuple[tuple[Poly, Poly], ...]
"""A piece of a dimension: its start and size along every digit."""
RealRow = Callable[["Reals", Apply, Address], Number]


def pieces(run: Evaluator, dims: Sequence[Dim]) -> product[tuple[Segments, ...]]:
    """Return every combination of pieces along every digit, each with start and size."""
    whole = (polys.ZERO, polys.ZERO)
    return product(*(product(*([whole] if d.splice else run.segments(d) for d in dim)) for dim in dims))


@dataclass
class Reals:
    """The elements of terms in one piece of the result.

    run      the evaluator of terms' dims
    rows     the definition of every operator
    sizes    the upper bound of every index
    given    True for terms of the left side, which is well-formed
    """

    run: Evaluator
    rows: Mapping[str, RealRow]
    numbers: RealNumbers = field(init=False)
    given: bool = True
    sizes: dict[str, Poly] = field(default_factory=dict)
    _made: dict[tuple[Term, tuple[tuple[int, ...], ...]], tuple[Address, Number]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers = RealNumbers(self.run.symbols.is_positive)

    def dims(self, term: Term) -> tuple[Dim, ...]:
        """Return the dims of a term."""
        return self.run.tensor(term).dims

    def at(self, name: Number, start: Poly, size: Poly) -> Number:
        """Return a position in a piece of a digit, by an index that counts from its start."""
        self.sizes[name_of(name)] = size
        return z3.simplify(translated(start) + name, som=True) if start.terms else name

    def holds(self, condition: Formula) -> bool | None:
        """Return whether a condition holds (True) or fails (False) for all positions; None for neither."""
        known = [(z3.Int(n), self.sizes[n]) for n in sorted(self.numbers.depends(condition)) if n in self.sizes]
        ranges = [z3.And(n >= 0, n < translated(size)) for n, size in known]
        given = [*ranges, *self.run.symbols.given([])]
        sizes = [z3.Int(str(name)) >= 1 for name in self.run.symbols.positive]
        if is_valid(condition, [*given, *sizes]):
            return True
        return False if is_valid(z3.Not(condition), [*given, *sizes]) else None

    def element(self, term: Term, index: Address) -> Number:
        """Return the element of a term at an index. It is made once, so its needs count for both sides."""
        key = (term, tuple(tuple(number.get_id() for number in place) for place in index))
        if key not in self._made:  # the index is kept, so that its ids are not reused
            self._made[key] = (index, self._element(term, index))
        return self._made[key][1]

    def _element(self, term: Term, index: Address) -> Number:
        if isinstance(term, Variable):
            return self.cell(term.name, index)
        if term.op not in self.rows:
            raise RuleError(f"{term.op} has no semantics in real numbers")
        return self.rows[term.op](self, term, index)

    def cell(self, name: str, index: Address) -> Number:
        """Return an element of a tensor of which nothing is known."""
        places = [number for place in index for number in place]
        return z3.Function(name, *(n.sort() for n in places), z3.RealSort())(*places)

    def constant(self, value: Expression) -> Number:
        """Return an attribute as a number: a literal, a size, or a constant with the attribute's name."""
        if value.names & {*self.run.rule.sizes, *self.run.symbols.solved}:
            return self.numbers.size(self.run.symbols.number(value.tree))
        if isinstance(value.tree, ast.UnaryOp) and isinstance(value.tree.op, ast.USub):
            return -self.constant(Expression(ast.unparse(value.tree.operand)))
        number = None if value.names else value.evaluate({})
        return (
            z3.RealVal(str(Fraction(str(number)))) if isinstance(number, int | float) else z3.Real(f"attribute {value}")
        )

    def read(self, term: Term, index: Address) -> Number:
        """Return the element of an operand from which a pointwise result at this index is computed."""
        dims = self.dims(term)
        suffix = index[len(index) - len(dims) :]
        return self.element(term, tuple(place if dim else () for dim, place in zip(dims, suffix, strict=True)))

    def total(self, dims: Sequence[Dim], number: Callable[..., Number]) -> Number:
        """Return Σ over these dimensions of number(places)."""
        return sum_of([self.numbers.total(bounds, number(*places)) for places, bounds in self._positions(dims)])

    def greatest(self, dims: Sequence[Dim], number: Callable[..., Number]) -> Number:
        """Return the maximum over these dimensions of number(places)."""
        maxima = [self.numbers.greatest(bounds, number(*places)) for places, bounds in self._positions(dims)]
        return reduce(larger, maxima)

    def _positions(self, dims: Sequence[Dim]) -> Iterator[tuple[Address, list[Binding]]]:
        """Yield all positions of these dimensions, piece by piece, with their bound indices."""
        for cuts in pieces(self.run, dims):
            bounds = [(self.numbers.bound(), size) for cut in cuts for _, size in cut]
            names = (name for name, _ in bounds)
            yield tuple(tuple(self.at(next(names), start, size) for start, size in cut) for cut in cuts), bounds


def larger(x: Number, y: Number) -> Number:
    """Return the greater of two numbers."""
    return z3.If(x > y, x, y)


def expect(term: Apply, condition: bool) -> None:
    """Raise unless the condition holds: the term is beyond these proofs."""
    if not condition:
        raise RuleError(f"{term}: beyond the proofs in real numbers")
