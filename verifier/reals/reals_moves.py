"""Rows in real numbers: element by element, and those that move elements or look them up."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import extent, spliced
from shardwright.verifier.algebra.polys import Poly
from shardwright.verifier.algebra.symbols import translated
from shardwright.verifier.logic import Number, z3
from shardwright.verifier.reals.numbers import Numbers
from shardwright.verifier.reals.reals import Index, Place, Reals, Row, expect

# ---- element by element ----


def _sigmoid(numbers: Numbers, x: Number) -> Number:
    """1/2 + 1/2 · tanh(x/2)."""
    return (1 + numbers.odd("tanh", x / 2)) / 2


_POINTWISE: Mapping[str, Callable[..., Number]] = {
    "add": lambda numbers, x, y: x + y,
    "sub": lambda numbers, x, y: x - y,
    "mul": lambda numbers, x, y: x * y,
    "div": lambda numbers, x, y: x * numbers.inverse(y),
    "maximum": lambda numbers, x, y: z3.If(x > y, x, y),
    "minimum": lambda numbers, x, y: z3.If(x < y, x, y),
    "neg": lambda numbers, x: -x,
    "contiguous": lambda numbers, x: x,
    "relu": lambda numbers, x: z3.If(x > 0, x, z3.RealVal(0)),
    "abs": lambda numbers, x: z3.If(x > 0, x, -x),
    "reciprocal": Numbers.inverse,
    "exp": Numbers.exp,
    "log": Numbers.log,
    "sqrt": lambda numbers, x: numbers.function("sqrt", x, partial=True),
    "rsqrt": lambda numbers, x: numbers.function("rsqrt", x, partial=True),
    "sigmoid": _sigmoid,
    "silu": lambda numbers, x: x * _sigmoid(numbers, x),
    "tanh": lambda numbers, x: numbers.odd("tanh", x),
    "sin": lambda numbers, x: numbers.odd("sin", x),
    "erf": lambda numbers, x: numbers.odd("erf", x),
    "cos": lambda numbers, x: numbers.function("cos", x),
    "softplus": lambda numbers, x: numbers.function("softplus", x),
}


def _gelu(reals: Reals, term: Apply, index: Index) -> Number:
    """x/2 · (1 + φ(x)), φ odd."""
    x = reals.read(term.operands[0], index)
    return x / 2 * (1 + reals.numbers.odd(f"phi {dict(term.attrs)['approximate']}", x))


def _detach(reals: Reals, term: Apply, index: Index) -> Number:
    """Any number, where the operand exists: its gradient is 0 whatever it is."""
    reals.element(term.operands[0], index)
    return reals.cell(f"any {term}", index)


# ---- moves ----


def _slice(reals: Reals, term: Apply, index: Index) -> Number:
    attrs, dims = dict(term.attrs), reals.dims(term.operands[0])
    at = reals.run.position(dims, attrs["dim"])
    start: Poly | None = reals.run.symbols.number(attrs["start"])
    start = start.over(extent(dims[at][1:])) if dims[at][1:] else start
    expect(term, start is not None)
    place = index[at]
    moved = (z3.simplify(place[0] + translated(start), som=True), *place[1:]) if dims[at] else ()  # type: ignore[arg-type]
    return reals.element(term.operands[0], (*index[:at], moved, *index[at + 1 :]))


def _concat(reals: Reals, term: Apply, index: Index) -> Number:
    dims = [reals.dims(x) for x in term.operands]
    at = reals.run.position(dims[0], dict(term.attrs)["dim"])
    sizes = [d[at][0].size if d[at] else polys.ONE for d in dims]

    def piece(number: int, start: Poly) -> Number:
        place = z3.simplify(index[at][0] - translated(start), som=True)
        if number < len(sizes) - 1:
            inside = place < translated(sizes[number])
            known = reals.holds(inside)
            if known is False:
                return piece(number + 1, start + sizes[number])
            if known is None:
                raise RuleError(f"{term}: an index that may be in several pieces")
        moved = (place, *index[at][1:]) if dims[number][at] else ()
        return reals.element(term.operands[number], (*index[:at], moved, *index[at + 1 :]))

    return piece(0, polys.ZERO)


def _permute(reals: Reals, term: Apply, index: Index) -> Number:
    """The element at the permuted index; of any number of dimensions, by at(compose(p, q), j) = at(p, at(q, j))."""
    dims, value = reals.dims(term.operands[0]), dict(term.attrs)["dims"]
    tree = value.tree
    if value.names and not isinstance(tree, ast.Tuple):
        ((place,),) = index
        for name in reversed(polys.composed(reals.run.symbols.attribute(value))):
            place = z3.Function(f"at {name}", z3.IntSort(), z3.IntSort())(place)
        return reals.element(term.operands[0], ((place,),))
    order = [
        0 if isinstance(entry, ast.Starred) else reals.run.position(dims, Expression(ast.unparse(entry)))
        for entry in tree.elts  # type: ignore[attr-defined]
    ]
    return reals.element(term.operands[0], tuple(index[order.index(d)] for d in range(len(order))))


def _reshape(reals: Reals, term: Apply, index: Index) -> Number:
    """Digits are regrouped; one whose size is a product of several is read at Σ position · stride."""
    (x,), shape = term.operands, dict(term.attrs)["shape"]
    if not isinstance(shape.tree, ast.Tuple):
        return _reshape_all(reals, term, index)
    new = [digit for dim in reals.dims(term) for digit in dim]
    places = [number for place in index for number in place]
    found: list[Place] = []
    for dim in reals.dims(x):
        own: list[Number] = []
        for digit in dim:
            expect(term, bool(new))
            first, value = new.pop(0), places.pop(0)
            if digit.splice or first.splice:
                expect(term, digit.splice == first.splice)
            size = first.size
            while not digit.splice and size != digit.size:
                expect(term, bool(new) and not new[0].splice)
                value = value * translated(new[0].size) + places.pop(0)
                size = size * new.pop(0).size
            own.append(value if digit.splice else z3.simplify(value, som=True))
        found.append(tuple(own))
    expect(term, not new)
    return reals.element(x, tuple(found))


def _reshape_all(reals: Reals, term: Apply, index: Index) -> Number:
    """Any number of dimensions: the element at unflat(before, flat(after, j)), flat and unflat being inverse."""
    (x,), ((place,),) = term.operands, index
    before, after = spliced(reals.dims(x)[0]), spliced(reals.dims(term)[0])
    if before == after:
        return reals.element(x, index)
    flat, unflat = (z3.Function(name, z3.IntSort(), z3.IntSort()) for name in (f"flat {after}", f"unflat {before}"))
    inverse = place.num_args() == 1 and place.decl().name() == f"unflat {after}"
    return reals.element(x, ((unflat(place.arg(0) if inverse else flat(place)),),))


def _expand(reals: Reals, term: Apply, index: Index) -> Number:
    return reals.read(term.operands[0], index)


# ---- lookups ----


def _embedding(reals: Reals, term: Apply, index: Index) -> Number:
    """w[ids]; a row that is padding has no gradient, it is another row."""
    (w, ids), attrs = term.operands, dict(term.attrs)
    expect(term, str(attrs.get("offset", "0")) == "0" and len(reals.dims(w)[0]) == 1)
    row = z3.Function(f"row unless {attrs.get('padding_idx', 'None')}", z3.RealSort(), z3.IntSort())
    return reals.element(w, ((row(reals.element(ids, index[:-1])),), index[-1]))


# ---- constants ----


def _full(reals: Reals, term: Apply, index: Index) -> Number:
    return reals.constant(dict(term.attrs)["value"])


def _pointwise(function: Callable[..., Number]) -> Row:
    return lambda reals, term, index: function(reals.numbers, *(reals.read(x, index) for x in term.operands))


MOVES: Mapping[str, Row] = {
    **{name: _pointwise(function) for name, function in _POINTWISE.items()},
    "gelu": _gelu, "detach": _detach, "slice": _slice, "concat": _concat, "permute": _permute, "reshape": _reshape,
    "expand": _expand, "embedding": _embedding, "full": _full,
}  # fmt: skip
