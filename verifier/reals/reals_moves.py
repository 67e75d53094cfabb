"""Rows in real numbers: pointwise rows, and rows that move elements or look them up."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import Dim, extent, spliced
from shardwright.verifier.algebra.polys import Poly
from shardwright.verifier.algebra.symbols import translated
from shardwright.verifier.logic import Number, z3
from shardwright.verifier.reals.numbers import RealNumbers
from shardwright.verifier.reals.numbersums import is_indicator
from shardwright.verifier.reals.reals import Address, Place, RealRow, Reals, expect, larger

# ---- element by element ----


def _sigmoid(numbers: RealNumbers, x: Number) -> Number:
    """Return 1/2 + 1/2 · tanh(x/2)."""
    return (1 + numbers.odd("tanh", x / 2)) / 2


_POINTWISE: Mapping[str, Callable[..., Number]] = {
    "add": lambda numbers, x, y: x + y,
    "sub": lambda numbers, x, y: x - y,
    "mul": lambda numbers, x, y: x * y,
    "div": lambda numbers, x, y: x * numbers.inverse(y),
    "maximum": lambda numbers, x, y: larger(x, y),
    "minimum": lambda numbers, x, y: z3.If(x < y, x, y),
    "neg": lambda numbers, x: -x,
    "contiguous": lambda numbers, x: x,
    "expand": lambda numbers, x: x,
    "relu": lambda numbers, x: larger(x, z3.RealVal(0)),
    "abs": lambda numbers, x: z3.If(x > 0, x, -x),
    "reciprocal": RealNumbers.inverse,
    "exp": RealNumbers.exp,
    "log": RealNumbers.log,
    "sqrt": RealNumbers.root,
    "rsqrt": lambda numbers, x: numbers.inverse(numbers.root(x)),
    "le": lambda numbers, x, y: numbers.indicator("at least 0", y - x),
    "sigmoid": _sigmoid,
    "silu": lambda numbers, x: x * _sigmoid(numbers, x),
    "tanh": lambda numbers, x: numbers.odd("tanh", x),
    "sin": lambda numbers, x: numbers.odd("sin", x),
    "erf": lambda numbers, x: numbers.odd("erf", x),
    "cos": lambda numbers, x: numbers.even("cos", x),
    "softplus": lambda numbers, x: numbers.function("softplus", x),
}


def _gelu(reals: Reals, term: Apply, index: Address) -> Number:
    """Return x/2 · (1 + φ(x)), where φ is odd."""
    x = reals.read(term.operands[0], index)
    return x / 2 * (1 + reals.numbers.odd(f"phi {dict(term.attrs)['approximate']}", x))


def _detach(reals: Reals, term: Apply, index: Address) -> Number:
    """Return an arbitrary number, where the operand exists: its gradient is 0 in any case."""
    reals.element(term.operands[0], index)
    return reals.cell(f"any {term}", index)


def _where(reals: Reals, term: Apply, index: Address) -> Number:
    """Return c·x + (1 - c)·y if both exist everywhere; the product would require the element not chosen to exist."""
    condition, needs = reals.read(term.operands[0], index), len(reals.numbers.needs)
    chosen, other = (reals.read(x, index) for x in term.operands[1:])
    ((coefficient, factors),) = reals.numbers.monomials(condition)
    expect(term, coefficient == 1 and all(map(is_indicator, factors)) and len(reals.numbers.needs) == needs)
    return condition * chosen + (1 - condition) * other


# ---- moves ----


def _slice(reals: Reals, term: Apply, index: Address) -> Number:
    attrs, dims = dict(term.attrs), reals.dims(term.operands[0])
    at = reals.run.position(dims, attrs["dim"])
    start: Poly | None = reals.run.symbols.number(attrs["start"].tree)
    start = start.over(extent(dims[at][1:])) if dims[at][1:] else start
    expect(term, start is not None)
    place = index[at]
    moved = (z3.simplify(place[0] + translated(start), som=True), *place[1:]) if dims[at] else ()  # type: ignore[arg-type]
    return reals.element(term.operands[0], (*index[:at], moved, *index[at + 1 :]))


def _concat(reals: Reals, term: Apply, index: Address) -> Number:
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
                numbers, needs = reals.numbers, len(reals.numbers.needs)
                is_here = numbers.indicator(f"below {sizes[number]}", z3.ToReal(place))
                here, later = read(number, place), piece(number + 1, start + sizes[number])
                expect(term, len(numbers.needs) == needs)  # a piece that is not chosen need not exist
                return z3.If(is_here == 1, here, later)
        return read(number, place)

    def read(number: int, place: Number) -> Number:
        moved = (place, *index[at][1:]) if dims[number][at] else ()
        return reals.element(term.operands[number], (*index[:at], moved, *index[at + 1 :]))

    return piece(0, polys.ZERO)


def _permute(reals: Reals, term: Apply, index: Address) -> Number:
    """Return the element at the permuted index; for a splice, by at(compose(p, q), j) = at(p, at(q, j))."""
    dims, value = reals.dims(term.operands[0]), dict(term.attrs)["dims"]
    tree = value.tree
    if value.names and not isinstance(tree, ast.Tuple):
        ((place,),) = index
        for name in reversed(polys.composed(reals.run.symbols.attribute(tree))):
            place = z3.Function(f"at {name}", z3.IntSort(), z3.IntSort())(place)
        return reals.element(term.operands[0], ((place,),))
    order = [
        0 if isinstance(entry, ast.Starred) else reals.run.position(dims, Expression(ast.unparse(entry)))
        for entry in tree.elts  # type: ignore[attr-defined]
    ]
    return reals.element(term.operands[0], tuple(index[order.index(d)] for d in range(len(order))))


def _reshape(reals: Reals, term: Apply, index: Address) -> Number:
    """Return the element after a regrouping of digits; a digit that is a product is read at Σ position · stride."""
    (x,), shape = term.operands, dict(term.attrs)["shape"]
    if not isinstance(shape.tree, ast.Tuple):
        return _reshape_all(reals, term, index)
    new = [digit for dim in reals.dims(term) for digit in dim]
    places = [number for place in index for number in place]
    address: list[Place] = []
    for dim in reals.dims(x):
        numbers: list[Number] = []
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
            numbers.append(value if digit.splice else z3.simplify(value, som=True))
        address.append(tuple(numbers))
    expect(term, not new)
    return reals.element(x, tuple(address))


def _reshape_all(reals: Reals, term: Apply, index: Address) -> Number:
    """Return the element of a reshaped splice at unflat(before, flat(after, j)); flat and unflat are inverse."""
    (x,), ((place,),) = term.operands, index
    before, after = spliced(reals.dims(x)[0]), spliced(reals.dims(term)[0])
    if before == after:
        return reals.element(x, index)
    flat, unflat = (z3.Function(name, z3.IntSort(), z3.IntSort()) for name in (f"flat {after}", f"unflat {before}"))
    inverse = place.num_args() == 1 and place.decl().name() == f"unflat {after}"
    return reals.element(x, ((unflat(place.arg(0) if inverse else flat(place)),),))


# ---- lookups ----


def _looked_up(reals: Reals, term: Apply, at: int, rank: int, ids_index: Address, index: Address) -> Number:
    """Return the first operand's element at a row named by the second, which replaces `rank` index places from `at`."""
    (x, ids), attrs = term.operands, dict(term.attrs)
    expect(term, len(reals.dims(x)[at]) == 1 and str(attrs.get("offset", "0")) == "0")
    row = z3.Function(f"row unless {attrs.get('padding_idx')}", z3.RealSort(), z3.IntSort())
    return reals.element(x, (*index[:at], (row(reals.element(ids, ids_index)),), *index[at + rank :]))


def _gather(reals: Reals, term: Apply, index: Address) -> Number:
    """Return the element of x[…, ids[…], …], where the indices have the rank of x."""
    at = reals.run.position(reals.dims(term.operands[0]), dict(term.attrs)["dim"])
    return _looked_up(reals, term, at, 1, index, index)


def _index(reals: Reals, term: Apply, index: Address) -> Number:
    """Return x indexed along one dimension, by indices of any rank; a padding row, without gradient, is another row."""
    (x, ids), attrs = term.operands, dict(term.attrs)
    at, rank = reals.run.position(reals.dims(x), attrs["dim"]) if "dim" in attrs else 0, len(reals.dims(ids))
    return _looked_up(reals, term, at, rank, index[at : at + rank], index)


def inside(reals: Reals, dim: Dim, value: Number) -> Number:
    """Return 1 where an index is within a dimension, else 0."""
    return reals.numbers.indicator(f"below {extent(dim)}", value)


def chosen(dim: Dim, value: Number) -> Place:
    """Return the place along a dimension that an index names."""
    sizes = " ".join(str(digit.size) for digit in dim)
    digits = (z3.Function(f"digit {i} of {sizes}", z3.RealSort(), z3.IntSort()) for i in range(len(dim)))
    return tuple(digit(value) for digit in digits)


def not_ignored(reals: Reals, ignored: Expression, value: Number) -> Number:
    """Return 1 where an index is not the ignored one, else 0."""
    return reals.numbers.indicator(f"kept unless {ignored}", value)


def _pick(reals: Reals, term: Apply, index: Address) -> Number:
    """Return the element of x[…, ids], 0 where an index is outside."""
    (x, ids), dim = term.operands, reals.dims(term.operands[0])[-1]
    value = reals.element(ids, index)
    return inside(reals, dim, value) * reals.element(x, (*index, chosen(dim, value)))


def _ne(reals: Reals, term: Apply, index: Address) -> Number:
    """Return 1 where an index differs from a constant, else 0."""
    constant, ids = sorted(term.operands, key=lambda x: not (isinstance(x, Apply) and x.op == "full"))
    expect(term, isinstance(constant, Apply))
    return not_ignored(reals, dict(constant.attrs)["value"], reals.read(ids, index))  # type: ignore[union-attr]


# ---- constants ----


def number_of(dim: Dim, place: Place) -> Number:
    """Return a position along a dimension as one real number."""
    value = z3.IntVal(0)
    for digit, at in zip(dim, place, strict=True):
        value = value * translated(digit.size) + at
    return z3.ToReal(value)


def _pointwise(function: Callable[..., Number]) -> RealRow:
    return lambda reals, term, index: function(reals.numbers, *(reals.read(x, index) for x in term.operands))


MOVES: Mapping[str, RealRow] = {
    **{name: _pointwise(function) for name, function in _POINTWISE.items()},
    "gelu": _gelu, "detach": _detach, "where": _where,
    "slice": _slice, "concat": _concat, "permute": _permute, "reshape": _reshape,
    "embedding": _index, "gather": _gather, "index": _index, "pick": _pick, "ne": _ne,
    "full": lambda reals, term, index: reals.constant(dict(term.attrs)["value"]),
    "arange": lambda reals, term, index: number_of(reals.dims(term)[0], index[0]),
}  # fmt: skip
