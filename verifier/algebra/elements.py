"""Symbolic shapes and elements of terms: the index semantics that algebraic rules are proven with.

A tensor has dimensions; a dimension is a product of digits, major first: `(h d)` has two digits, a plain dimension has
one, and the literal 1 has none. A splice `*b` stands for any number of dimensions. It is one digit with one index for
all of them, as rows act on leading dimensions point by point. A concatenation cuts a digit into segments. A sum over
the digit is then a sum over each segment, and an index that is known to lie in one segment reads that piece.

A permutation or a reshape of a whole splice maps its index by functions. These equations are assumed of them, for index
tuples j and offsets n in row-major order (`verifier/algebra/polys.py` applies them):

    at(compose(p, q), j) = at(p, at(q, j))     at(iota, j) = j
    flat(s, unflat(s, n)) = n                  reshape to t of shape s reads unflat(s, flat(t, j))
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply, Term, Variable, is_splice
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.laws import Laws
from shardwright.verifier.algebra.monomials import Bound, Normal
from shardwright.verifier.algebra.polys import Poly, poly
from shardwright.verifier.algebra.symbols import Symbols
from shardwright.verifier.proof import UnprovenError


class Position(NamedTuple):
    """A position along a digit: `value`, which is known to be in [low, high)."""

    value: Poly
    low: Poly
    high: Poly


@dataclass(frozen=True)
class Digit:
    """A digit of a dimension: the sizes of its segments, or a splice with a name."""

    segments: tuple[Poly, ...] = ()
    splice: str = ""

    @property
    def size(self) -> Poly:
        return sum(self.segments, polys.ZERO)

    @property
    def starts(self) -> tuple[Poly, ...]:
        """The start of each segment, and the end of the last one."""
        return tuple(accumulate(self.segments, initial=polys.ZERO))

    def __str__(self) -> str:
        return self.splice or str(self.size)


Dim = tuple[Digit, ...]
Index = tuple[tuple[Position, ...], ...]
Element = Callable[[Index], Normal]


@dataclass(frozen=True, eq=False)
class Tensor:
    """A term's dims and its element at an index."""

    dims: tuple[Dim, ...]
    element: Element


Semantics = Callable[["Evaluator", Apply, Sequence[Tensor]], Tensor]
Rows = Mapping[str, Semantics]


def spliced(dim: Dim) -> str:
    """Return the name of the splice that a dimension is, or ""."""
    return dim[0].splice if len(dim) == 1 else ""


def extent(dim: Dim) -> Poly:
    """Return the size of a dimension."""
    return polys.product(d.size for d in dim)


def shown(dim: Dim) -> str:
    """Return the text of a dimension for messages."""
    return spliced(dim) or str(extent(dim))


@dataclass
class Evaluator:
    """The evaluator of one rule's terms.

    rows        the semantics of every row
    assuming    True for terms of the left side, whose well-formedness is assumed; otherwise it must be proven
    equations   pairs of dims whose sizes the left side needs to be equal
    ranges      sizes of dimensions that the left side indexes by a variable, whose elements are below them
    cuts        positions where concatenations cut digits of a size; sums over other digits of this size are cut alike
    """

    rule: Equation
    symbols: Symbols
    forms: Laws
    rows: Rows
    assuming: bool = True
    equations: list[tuple[Dim, Dim]] = field(default_factory=list)
    cuts: dict[Poly, tuple[Poly, ...]] = field(default_factory=dict)
    use_cuts: bool = False
    ranges: dict[str, list[Poly]] = field(default_factory=dict)
    _made: dict[Term, Tensor] = field(default_factory=dict)

    def tensor(self, term: Term) -> Tensor:
        """Return the dims and elements of a term; raise `RuleError` if it is ill-shaped or beyond these semantics."""
        if term not in self._made:
            self._made[term] = self._variable(term) if isinstance(term, Variable) else self._apply(term)
        return self._made[term]

    def _variable(self, variable: Variable) -> Tensor:
        dims = tuple(
            (Digit(splice=entry[0][1:]),) if is_splice(entry)
            else tuple(Digit((size,)) for name in entry for size in self.symbols.digits(name))
            for entry in self.rule.dims[variable.name].entries
        )  # fmt: skip
        name = variable.name
        return Tensor(dims, lambda index: self.forms.cell(name, [p.value for dim in index for p in dim]))

    def _apply(self, term: Apply) -> Tensor:
        operands = [self.tensor(operand) for operand in term.operands]
        _expect_numbers(term)
        if term.op not in self.rows:
            raise RuleError(
                f"{term.op} has no index semantics for algebraic rules; add them in verifier/algebra/elements.py"
            )
        return self.rows[term.op](self, term, operands)

    def agree(self, left: Tensor, right: Tensor, index: Index) -> bool:
        """Return whether two elements are equal, where the right one exists wherever the left one does."""
        ours = left.element(index)  # first: its existence is then assumed
        self.forms.assume(ours)
        theirs = right.element(index)
        self.forms.assume(())
        if ours == theirs:
            return True
        self.forms.exists = True
        ours = left.element(index)
        self.forms.exists = False
        self.forms.assume(())
        return ours == theirs

    # ---- what operators need ----

    def need_equal(self, what: str, left: Dim, right: Dim) -> Dim:
        """Require both dims to have the same size, and return the dim with the segments of both."""
        if spliced(left) or spliced(right):
            if spliced(left) != spliced(right):
                raise RuleError(f"{what}: dimension {shown(left)} against {shown(right)}")
            return left
        if self.assuming:
            if extent(left) != extent(right):
                self.equations.append((left, right))
        elif not self.symbols.equals(extent(left), extent(right)):
            raise UnprovenError(self.symbols.failure(what, "==", extent(left) - extent(right)))
        return self.common(what, left, right)

    def proven_equal(self, what: str, left: Dim, right: Dim) -> Dim:
        """Do as `need_equal`, but also prove equality on the left side, as NumPy would broadcast a size of 1."""
        if not spliced(left) and not spliced(right) and not self.symbols.equals(extent(left), extent(right)):
            if self.assuming:
                raise RuleError(f"{what}: dimension {shown(left)} against {shown(right)}")
            raise UnprovenError(self.symbols.failure(what, "==", extent(left) - extent(right)))
        return self.need_equal(what, left, right)

    def need(self, what: str, *values: Poly) -> None:
        """Require all of these numbers to be at least 0."""
        for value in values:
            if self.assuming:
                self.symbols.learn(value)
            elif not self.symbols.nonnegative(value):
                raise UnprovenError(self.symbols.failure(what, ">=", value))

    def common(self, what: str, left: Dim, right: Dim) -> Dim:
        """Return the digits of both dims, with the segments of both."""
        if len(left) != len(right):
            if self.assuming and self.equations:
                return left  # evaluated again once the equation is solved
            raise RuleError(f"{what}: the digits {shown(left)} against {shown(right)}")
        return tuple(a if a == b else self._refined(what, a, b) for a, b in zip(left, right, strict=True))

    def _refined(self, what: str, a: Digit, b: Digit) -> Digit:
        if not self.symbols.equals(a.size, b.size):
            if self.assuming and self.equations:
                return a
            raise RuleError(f"{what}: the digits {a} against {b}")
        return self._cut_at(a, b.starts[1:-1])

    def _cut_at(self, digit: Digit, places: Sequence[Poly]) -> Digit:
        """Return the digit with more cuts if their order is known, else the digit unchanged."""
        starts = list(digit.starts)
        for place in places:
            if any(self.symbols.equals(place, s) for s in starts):
                continue
            at = next((i for i, s in enumerate(starts) if self.symbols.nonnegative(s - place)), None)
            if at is None or at == 0 or not self.symbols.nonnegative(place - starts[at - 1]):
                return digit
            starts.insert(at, place)
        return Digit(tuple(b - a for a, b in pairwise(starts)))

    # ---- indices ----

    def families(self, dims: Sequence[Dim]) -> Iterator[tuple[Index, list[Bound]]]:
        """Yield, for each choice of segments of some dimensions, positions with new bound indices over their sizes."""
        for cuts in product(*(product(*map(self.segments, dim)) for dim in dims)):
            bounds = [(self.forms.fresh(), size) for cut in cuts for _, size in cut]
            names = (poly(name) for name, _ in bounds)
            yield tuple(tuple(Position(s + next(names), s, s + size) for s, size in cut) for cut in cuts), bounds

    def segments(self, digit: Digit) -> list[tuple[Poly, Poly]]:
        """Return the start and size of every segment."""
        if digit.splice:
            raise RuleError(f"needs a plain dimension, got the splice {digit.splice}")
        if self.use_cuts and digit.size in self.cuts:
            digit = self._cut_at(digit, self.cuts[digit.size])
        return list(zip(digit.starts, digit.segments, strict=False))

    def mark_cuts(self, digit: Digit) -> None:
        """Record the segments that a concatenation makes."""
        if len(digit.segments) > 1:
            known = self.cuts.get(digit.size, ())
            self.cuts[digit.size] = (*known, *(s for s in digit.starts[1:-1] if s not in known))

    def rank(self, x: Tensor) -> int:
        """Return the least rank of a tensor: splices may be empty unless a guard says otherwise."""
        return sum(1 for d in x.dims if not spliced(d) or spliced(d) in self.symbols.nonempty)

    def position(self, dims: Sequence[Dim], value: Expression) -> int:
        """Return which of `dims` an attribute such as `len(b)` names, for all lengths of the splices."""
        if any(isinstance(n, ast.Constant) and type(n.value) is not int for n in ast.walk(value.tree)):
            raise RuleError(f"{value} is not a dimension")
        if not value.names:
            number = value.evaluate({})
            if isinstance(number, int) and 0 <= number < len(dims) and not any(map(spliced, dims[: number + 1])):
                return number
        names = sorted({spliced(d).partition(" by ")[0] for d in dims if spliced(d)})
        if not value.names <= set(names) or not all(isinstance(n, _SUMS_OF_LENGTHS) for n in ast.walk(value.tree)):
            raise RuleError(f"{value} does not name one dimension")
        places = set[int]()
        for lengths in product((0, 1, 2, 5), repeat=len(names)):  # two lengths suffice: positions are sums of lengths
            rank = dict(zip(names, lengths, strict=True))
            number = value.evaluate({name: (1,) * length for name, length in rank.items()})
            spans = [rank[spliced(d).partition(" by ")[0]] if spliced(d) else 1 for d in dims]
            starts = [sum(spans[:i]) for i in range(len(dims))]
            places.add(next((i for i, s in enumerate(starts) if s == number and not spliced(dims[i])), -1))
        if len(places) != 1 or -1 in places:
            raise RuleError(f"{value} does not name one dimension")
        return places.pop()


_SUMS_OF_LENGTHS = (ast.BinOp, ast.Add, ast.Sub, ast.Constant, ast.Call, ast.Name, ast.expr_context)
_OF_BOOLS = ("contiguous", "slice", "concat", "permute", "reshape", "expand", "mul", "where", "sum")
_WITH_BOOLS = ("add", "mul", "where")


def is_bool(term: Term) -> bool:
    """Return whether the elements of a term are bools; indices are integers."""
    if isinstance(term, Variable) or term.op == "sum":
        return False
    return term.op in ("le", "ne") or (bool(term.operands) and all(map(is_bool, term.operands)))


def _expect_numbers(term: Apply) -> None:
    """Raise for arithmetic of bools: their sum is a bool, and they have no negative."""
    bools = [is_bool(operand) for operand in term.operands]
    if (all(bools) and bools and term.op not in _OF_BOOLS) or (
        any(bools) and term.op not in (*_OF_BOOLS, *_WITH_BOOLS)
    ):
        raise RuleError(f"{term}: arithmetic of bools")


def expect(term: Apply, condition: bool) -> None:
    """Raise unless the condition holds: the term is beyond the semantics of its row."""
    if not condition:
        raise RuleError(f"{term}: beyond the index semantics of verifier/algebra/elements.py")


def plain(term: Apply, dim: Dim) -> Dim:
    """Return a dimension that is not a splice; raise for a splice."""
    if spliced(dim):
        raise RuleError(f"{term}: needs a plain dimension, got the splice {spliced(dim)}")
    return dim
