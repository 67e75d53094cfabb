"""Index semantics of lookups by indices, of constants, and of comparisons with constants."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.rules.attributes import types
from shardwright.substitutions.terms import Apply, Term, Variable, subterms
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import (
    Dim,
    Evaluator,
    Index,
    Position,
    Rows,
    Tensor,
    expect,
    extent,
    plain,
)  # fmt: skip
from shardwright.verifier.algebra.elements_moves import entry
from shardwright.verifier.algebra.monomials import ZERO, Normal, NormalFactor
from shardwright.verifier.algebra.polys import App, Poly, app, poly


def looked_up(run: Evaluator, term: Apply, ids: Tensor, index: Index) -> Poly:
    """Return the integer that an index tensor holds: one cell of a variable."""
    element = ids.element(index)
    if len(element) == 1 and element[0][1] == 1 and len(element[0][0]) == 1:
        ((cell, power),) = element[0][0]
        unpadded = all(not str(place).startswith("unless ") for place in _places(cell))  # padding is about gradients
        if cell.kind == "cell" and power == 1 and unpadded:
            return app(f"value of {cell.parts[0]}", *cell.parts[1])  # type: ignore[arg-type]
    raise RuleError(f"{term}: an index that is not an element of a variable")


_FIRST = ("contiguous", "slice", "permute", "reshape", "expand", "index", "gather", "embedding")
"""Rows whose elements are elements of their first operand."""


def _indices(term: Term) -> set[str]:
    """Return the variables whose elements are the elements of an index tensor."""
    if isinstance(term, Variable):
        return {term.name}
    if term.op in _FIRST:
        return _indices(term.operands[0])
    if term.op == "concat":
        return set().union(*map(_indices, term.operands))
    raise RuleError(f"{term}: indices that are not elements of variables")


def within(run: Evaluator, term: Apply, dim: Dim) -> None:
    """Assume, on the left side, that indices are in range; on the right side, raise unless the left side implies it."""
    size = extent(plain(term, dim))
    for name in _indices(term.operands[1]):
        if run.assuming:
            run.ranges.setdefault(name, []).append(size)
        elif not any(run.symbols.nonnegative(size - other) for other in run.ranges.get(name, ())):
            raise RuleError(f"{term}: {name} is not known to be below {size}")


def row(run: Evaluator, term: Apply, dim: Dim, value: Poly) -> Position:
    """Return the position of an index, which is in range."""
    expect(term, len(plain(term, dim)) == 1)
    return Position(value, polys.ZERO, dim[0].size)


def embedding(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate w[ids]. The padding row has no gradient, so it is a different cell."""
    (w, _), attrs = operands, dict(term.attrs)
    expect(term, len(w.dims) == 2 and str(attrs.get("offset", "0")) == "0" and set(attrs) <= {"padding_idx", "offset"})
    return _rows(run, term, operands, 0, str(attrs.get("padding_idx")))


def index(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate x indexed along one dimension."""
    expect(term, len(operands) == 2)
    return _rows(run, term, operands, run.position(operands[0].dims, dict(term.attrs)["dim"]))


def _rows(run: Evaluator, term: Apply, operands: Sequence[Tensor], at: int, padding: str = "None") -> Tensor:
    """Evaluate the rows along one dimension that indices name, except a padding row."""
    x, ids = operands
    within(run, term, x.dims[at])

    def element(place: Index) -> Normal:
        value = looked_up(run, term, ids, place[at : at + len(ids.dims)])
        value = value if padding == "None" else app(f"unless {padding}", value)
        element = x.element((*place[:at], (row(run, term, x.dims[at], value),), *place[at + len(ids.dims) :]))
        if padding != "None":  # a computed row would pass its gradient on to what it is computed from
            expect(term, all(value in _places(f) for f in _cells(element)))
        return element

    return Tensor((*x.dims[:at], *ids.dims, *x.dims[at + 1 :]), element)


def _cells(part: object) -> Iterator[NormalFactor]:
    """Yield all elements of variables in a form."""
    if isinstance(part, NormalFactor) and part.kind == "cell":
        if not str(part.parts[0]).startswith("attribute "):
            yield part
    elif isinstance(part, NormalFactor | tuple):
        for inner in part.parts if isinstance(part, NormalFactor) else part:
            yield from _cells(inner)


def _places(cell: NormalFactor) -> Iterator[Poly]:
    """Yield the index of an element, and the applications inside it."""
    pending: list[Poly] = list(cell.parts[1])  # type: ignore[arg-type]
    while pending:
        place = pending.pop()
        yield place
        for atoms, _ in place.terms:
            for atom in atoms:
                if isinstance(atom, App):
                    yield poly(atom)
                    pending += atom.args


def gather(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate x[…, ids[…], …]."""
    x, ids = operands
    at = run.position(x.dims, dict(term.attrs)["dim"])
    expect(term, len(x.dims) == len(ids.dims))
    within(run, term, x.dims[at])
    for d, (a, b) in enumerate(zip(x.dims, ids.dims, strict=True)):
        if d != at:
            run.proven_equal(f"{term}: dimensions agree", a, b)

    def element(index: Index) -> Normal:
        position = row(run, term, x.dims[at], looked_up(run, term, ids, index))
        return x.element((*index[:at], (position,), *index[at + 1 :]))

    return Tensor(ids.dims, element)


Places = tuple[Position, ...]


def picked(run: Evaluator, term: Apply, dim: Dim, value: Poly, element: Callable[[Places], Normal]) -> Normal:
    """Return the element at an index along a dimension, 0 where the index is outside."""
    places, stride = list[Position](), polys.ONE
    for digit in reversed(plain(term, dim)):
        at = value if len(dim) == 1 else app("digit", value, stride, digit.size)
        places.insert(0, Position(at, polys.ZERO, digit.size))
        stride = stride * digit.size
    return run.forms.times(run.forms.indicator("in", value, stride), element(tuple(places)))


def pick(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate x[…, ids], which is 0 where an index is outside."""
    x, ids = operands
    expect(term, len(x.dims) == len(ids.dims) + 1 and set(dict(term.attrs)) <= {"offset"})
    expect(term, str(dict(term.attrs).get("offset", "0")) == "0")
    for a, b in zip(x.dims, ids.dims, strict=False):
        run.proven_equal(f"{term}: dimensions agree", a, b)

    def element(index: Index) -> Normal:
        value = looked_up(run, term, ids, index)
        return picked(run, term, x.dims[-1], value, lambda places: x.element((*index, places)))

    return Tensor(ids.dims, element)


def ne(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate the comparison of indices with a number: 1 where they differ."""
    at = next((i for i, t in enumerate(term.operands) if isinstance(t, Apply) and t.op == "full"), None)
    expect(term, at is not None and len(operands) == 2 and not operands[at].dims)
    ids, attrs = operands[1 - at], dict(term.operands[at].attrs)  # type: ignore[operator, union-attr, index]
    expect(term, "int" in str(attrs["dtype"]))

    def element(index: Index) -> Normal:
        return not_ignored(run, str(attrs["value"]), looked_up(run, term, ids, index))

    return Tensor(ids.dims, element)


def not_ignored(run: Evaluator, ignored: str, value: Poly) -> Normal:
    """Return the form that is 1 where an index is not the ignored one."""
    return run.forms.indicator("same", app(f"kept unless {ignored}", value))


def arange(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate 0, 1, …, stop - 1."""
    attrs = dict(term.attrs)
    start, stop, step = (run.symbols.number(attrs[key].tree) for key in ("start", "stop", "step"))
    expect(term, start == polys.ZERO and step == polys.ONE and "int" in str(attrs["dtype"]))
    expect(term, holds_numbers(attrs["dtype"]))
    run.need(f"{term}: not empty", stop - 1)
    dim = entry(run, attrs["stop"].tree)
    return Tensor((dim,), lambda index: run.forms.size(number(dim, index[0])))


def number(dim: Dim, places: tuple[Position, ...]) -> Poly:
    """Return a position along a dimension as one number."""
    value = polys.ZERO
    for digit, place in zip(dim, places, strict=True):
        value = value * digit.size + place.value
    return value


_INTEGERS = (("int",), ("Sequence[int]",))
_LARGEST = {"int32": 2**31 - 1, "int64": 2**63 - 1, "bfloat16": 3e38, "float32": 3e38, "float64": 1e308}
"""The data types of constants, and their largest numbers."""


def full(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate a constant: an integer over sizes, or a decimal."""
    attrs = dict(term.attrs)
    expect(term, isinstance(attrs["shape"].tree, ast.Tuple))
    expect(term, holds_numbers(attrs.get("dtype")))
    value, dtype = constant(run, attrs["value"]), attrs.get("dtype")
    integers = {name for root in run.rule.left for t in subterms(root) if isinstance(t, Apply)
                for key, v in t.attrs if types(t.op, key) in _INTEGERS for name in v.binds}  # fmt: skip
    whole = all(c.denominator == 1 for _, c in value) and attrs["value"].names <= run.symbols.sizes | integers
    expect(term, whole or "float" in str(dtype or "float"))
    expect(term, dtype is None or all(abs(c) <= _LARGEST[str(dtype).strip("'")] for _, c in value))
    return Tensor(tuple(entry(run, t) for t in attrs["shape"].tree.elts), lambda index: value)  # type: ignore[attr-defined]


def holds_numbers(dtype: Expression | None) -> bool:
    """Return whether a data type has negative and large numbers; bools and short types wrap them or overflow."""
    return dtype is None or str(dtype).strip("'") in _LARGEST


def constant(run: Evaluator, value: Expression) -> Normal:
    """Return the form of a number, or of a name that stands for one."""
    sign, tree = (-1, value.tree.operand) if isinstance(value.tree, ast.UnaryOp) else (1, value.tree)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) and not isinstance(tree.value, bool):
        return run.forms.number(sign * Fraction(str(tree.value)))
    if isinstance(tree, ast.Name) and tree.id not in run.symbols.sizes and tree.id not in run.symbols.solved:
        return run.forms.scaled(run.forms.cell(f"attribute {tree.id}", ()), sign)
    number = run.symbols.number(value.tree)
    return run.forms.size(number) if number.terms else ZERO


LOOKUPS: Rows = {
    "embedding": embedding,
    "gather": gather,
    "index": index,
    "full": full,
    "pick": pick,
    "ne": ne,
    "arange": arange,
}
