"""Index semantics of the rows that only move elements, and of lookups."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply, subterms
from shardwright.verifier import polys
from shardwright.verifier.elements import (
    Digit,
    Dim,
    Evaluator,
    Index,
    Position,
    Rows,
    Tensor,
    expect,
    extent,
    plain,
    spliced,
)  # fmt: skip
from shardwright.verifier.normal import ZERO, Normal
from shardwright.verifier.polys import Poly, app, poly


def identity(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """The operand itself."""
    expect(term, len(operands) == 1)
    return operands[0]


def slice_(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """A part of the major digit; the bounds are multiples of the others."""
    (x,), attrs = operands, dict(term.attrs)
    at = run.position(x.dims, attrs["dim"])
    dim = plain(term, x.dims[at])
    bounds = [run.symbols.number(attrs[key]) for key in ("start", "stop")]
    expect(term, run.symbols.number(attrs["step"]) == polys.ONE)
    start, stop = bounds
    major, rest = (dim[0], dim[1:]) if dim else (Digit((polys.ONE,)), ())
    whole = major.size
    if rest:
        parts = [part for bound in bounds if (part := bound.over(extent(rest))) is not None]
        if len(parts) < len(bounds):
            raise RuleError(f"{term}: bounds that are no multiples of {extent(rest)}")
        start, stop = parts
    run.need(f"{term}: within bounds", start, whole - start, stop, whole - stop)
    length = stop - start
    size = length if run.symbols.nonnegative(length) else app("max0", length)

    def element(index: Index) -> Normal:
        (value, low, high), *others = index[at]
        moved = Position(start + value, start + low, start + high)
        inner = (moved, *others) if dim else ()
        return x.element((*index[:at], inner, *index[at + 1 :]))

    return Tensor((*x.dims[:at], (Digit(_inherited(run, major, start, size)), *rest), *x.dims[at + 1 :]), element)


def _inherited(run: Evaluator, digit: Digit, start: Poly, size: Poly) -> tuple[Poly, ...]:
    """The segments of a slice: those of the whole that lie within it, where the bounds are cuts."""
    starts = list(digit.starts)
    if start in starts and start + size in starts and starts.index(start) < starts.index(start + size):
        return digit.segments[starts.index(start) : starts.index(start + size)]
    return (size,)


def concat(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Pieces one after the other along the major digit; an index of which the piece is not known reads all of them."""
    first, at = operands[0], run.position(operands[0].dims, dict(term.attrs)["dim"])
    minor: Dim = ()
    for x in operands:
        expect(term, len(x.dims) == len(first.dims) and len(plain(term, x.dims[at])) == len(first.dims[at]))
        for d, (a, b) in enumerate(zip(first.dims, x.dims, strict=True)):
            if d != at:
                run.need_equal(f"{term}: other dimensions agree", a, b)
        minor = run.need_equal(f"{term}: digits agree", first.dims[at][1:], x.dims[at][1:])
    pieces = [x.dims[at][0] if x.dims[at] else Digit((polys.ONE,)) for x in operands]
    major = Digit(tuple(segment for piece in pieces for segment in piece.segments))
    run.mark_cuts(major)
    starts = Digit(tuple(piece.size for piece in pieces)).starts

    def read(number: int, index: Index) -> Normal:
        (value, low, high), *others = index[at]
        start = starts[number]
        moved = (Position(value - start, low - start, high - start), *others) if operands[number].dims[at] else ()
        return operands[number].element((*index[:at], moved, *index[at + 1 :]))

    def element(index: Index) -> Normal:
        value, low, high = index[at][0]
        for number, (start, end) in enumerate(pairwise(starts)):
            if run.symbols.nonnegative(low - start) and run.symbols.nonnegative(end - high):
                return read(number, index)
        cut = [
            run.forms.times(run.forms.indicator("in", value - start, piece.size), read(number, index))
            for number, (start, piece) in enumerate(zip(starts, pieces, strict=False))
        ]
        return run.forms.add(*cut)

    dims = first.dims
    return Tensor((*dims[:at], (major, *minor), *dims[at + 1 :]), element)


def permute(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """The element at the permuted index."""
    (x,), dims = operands, dict(term.attrs)["dims"]
    if not dims.names:
        order = dims.evaluate({})
        plain_dims = not any(map(spliced, x.dims))
        expect(term, isinstance(order, tuple) and sorted(order) == list(range(len(x.dims))) and plain_dims)
        inverse = [order.index(d) for d in range(len(order))]
        return Tensor(tuple(x.dims[d] for d in order), lambda index: x.element(tuple(index[d] for d in inverse)))
    if isinstance(dims.tree, ast.Tuple):
        return _reordered(x, [_place(run, term, x, tree) for tree in dims.tree.elts], term)
    expect(term, len(x.dims) == 1 and bool(spliced(x.dims[0])))
    p = run.symbols.attribute(dims)
    name, _, before = spliced(x.dims[0]).partition(" by ")
    chain = " ".join([*before.split(), *polys.composed(p)])
    return Tensor(
        ((Digit(splice=f"{name} by {chain}" if chain else name),),),
        lambda index: x.element(((_opaque(app("at", p, index[0][0].value)),),)),
    )


def _place(run: Evaluator, term: Apply, x: Tensor, tree: ast.expr) -> int:
    """Which dimension an entry of a permutation names; `*iota(len(b))` is the leading splice b itself."""
    if isinstance(tree, ast.Starred):
        expect(term, bool(x.dims) and ast.unparse(tree.value) == f"iota(len({spliced(x.dims[0])}))")
        return 0
    return run.position(x.dims, Expression(ast.unparse(tree)))


def _reordered(x: Tensor, order: Sequence[int], term: Apply) -> Tensor:
    expect(term, sorted(order) == list(range(len(x.dims))))
    inverse = [order.index(d) for d in range(len(order))]
    return Tensor(tuple(x.dims[d] for d in order), lambda index: x.element(tuple(index[d] for d in inverse)))


def _opaque(value: Poly) -> Position:
    return Position(value, polys.ZERO, polys.ZERO)


def reshape(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Digits are regrouped; a digit whose size is a product of extents is read at Σ position · stride."""
    (x,), shape = operands, dict(term.attrs)["shape"]
    if shape.name is not None or not isinstance(shape.tree, ast.Tuple):
        expect(term, len(x.dims) == 1 and bool(spliced(x.dims[0])) and shape.name is not None)
        before, after = poly(f"shape {spliced(x.dims[0])}"), poly(f"shape {shape}")
        if shape.name == spliced(x.dims[0]):
            return x
        return Tensor(
            ((Digit(splice=str(shape)),),),
            lambda index: x.element(((_opaque(app("unflat", before, app("flat", after, index[0][0].value))),),)),
        )
    digits = [digit for dim in x.dims for digit in dim]
    groups = _grouped(run, term, digits, shape.tree.elts)

    def element(index: Index) -> Normal:
        return x.element(_regrouped(x.dims, _positions(groups, index)))

    return Tensor(tuple(g.dim for g in groups), element)


@dataclass(frozen=True)
class _Group:
    """One dimension of a reshaped tensor. `shares` one digit of the operand with its neighbours, as its `last` part."""

    dim: Dim
    shares: bool = False
    last: bool = True


def _grouped(run: Evaluator, term: Apply, digits: Sequence[Digit], entries: Sequence[ast.expr]) -> list[_Group]:
    """Each extent of the new shape as digits."""
    pending, groups = list(digits), list[_Group]()
    left: Poly | None = None
    for tree in entries:
        if isinstance(tree, ast.Starred):
            expect(term, bool(pending) and pending[0].splice == ast.unparse(tree.value) and left is None)
            groups.append(_Group((pending.pop(0),)))
            continue
        want = polys.product(run.symbols.entry(tree))
        if left is None and want != polys.ONE and pending and not pending[0].splice and pending[0].size != want:
            whole = pending[0].size.over(want)
            if whole is not None:  # a digit that several extents share
                left = pending[0].size
        if left is not None:
            rest = left.over(want)
            expect(term, rest is not None)
            left = None if rest == polys.ONE else rest
            groups.append(_Group(tuple(Digit((p,)) for p in run.symbols.entry(tree)), True, left is None))
            if left is None:
                pending.pop(0)
            continue
        taken: list[Digit] = []
        while polys.product(d.size for d in taken) != want:
            expect(term, bool(pending) and not pending[0].splice)
            taken.append(pending.pop(0))
        groups.append(_Group(tuple(taken)))
    expect(term, left is None and all(d.size == polys.ONE and not d.splice for d in pending))
    return groups


def _positions(groups: Sequence[_Group], index: Index) -> list[Position]:
    """The positions along the operand's digits."""
    found: list[Position] = []
    value, size = polys.ZERO, polys.ONE
    for group, positions in zip(groups, index, strict=True):
        if not group.shares:
            found += positions
            continue
        for digit, position in zip(group.dim, positions, strict=True):
            value, size = value * digit.size + position.value, size * digit.size
        if group.last:
            found.append(Position(value, polys.ZERO, size))
            value, size = polys.ZERO, polys.ONE
    return found


def _regrouped(dims: Sequence[Dim], positions: Sequence[Position]) -> Index:
    at, found = 0, list[tuple[Position, ...]]()
    for dim in dims:
        found.append(tuple(positions[at : at + len(dim)]))
        at += len(dim)
    return tuple(found)


def expand(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """The element of the dimensions that the operand has."""
    (x,), shape = operands, dict(term.attrs)["shape"]
    expect(term, isinstance(shape.tree, ast.Tuple))
    dims = tuple(_entry(run, tree) for tree in shape.tree.elts)  # type: ignore[attr-defined]
    expect(term, len(dims) >= len(x.dims))
    lead = len(dims) - len(x.dims)
    result = list(dims)
    for at, dim in enumerate(x.dims):
        expect(term, bool(dim) or not spliced(dims[lead + at]))
        if dim:
            result[lead + at] = run.proven_equal(f"{term}: dimensions agree", dim, dims[lead + at])

    def element(index: Index) -> Normal:
        return x.element(tuple(p if d else () for d, p in zip(x.dims, index[lead:], strict=True)))

    return Tensor(tuple(result), element)


def _entry(run: Evaluator, tree: ast.expr) -> Dim:
    if isinstance(tree, ast.Starred):
        return (Digit(splice=ast.unparse(tree.value)),)
    return tuple(Digit((size,)) for size in run.symbols.entry(tree))


# ---- lookups ----


def looked_up(run: Evaluator, term: Apply, ids: Tensor, index: Index) -> Poly:
    """The integer that an index tensor holds: one cell of a variable."""
    element = ids.element(index)
    if len(element) == 1 and element[0][1] == 1 and len(element[0][0]) == 1:
        ((cell, power),) = element[0][0]
        if cell.kind == "cell" and power == 1:
            return app(f"value of {cell.parts[0]}", *cell.parts[1])  # type: ignore[arg-type]
    raise RuleError(f"{term}: an index that is not an element of a variable")


def row(run: Evaluator, term: Apply, dim: Dim, value: Poly) -> Position:
    """The position that an index names: it is in range."""
    expect(term, len(plain(term, dim)) == 1)
    return Position(value, polys.ZERO, dim[0].size)


def embedding(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """w[ids]. A row that is padding has no gradient: it is another cell."""
    (w, ids), attrs = operands, dict(term.attrs)
    expect(term, len(w.dims) == 2 and str(attrs.get("offset", "0")) == "0" and set(attrs) <= {"padding_idx", "offset"})
    padding = attrs.get("padding_idx", Expression("None"))

    def element(index: Index) -> Normal:
        value = looked_up(run, term, ids, index[:-1])
        value = value if str(padding) == "None" else app(f"unless {padding}", value)
        return w.element(((row(run, term, w.dims[0], value),), index[-1]))

    return Tensor((*ids.dims, w.dims[1]), element)


def gather(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """x[…, ids[…], …]."""
    x, ids = operands
    at = run.position(x.dims, dict(term.attrs)["dim"])
    expect(term, len(x.dims) == len(ids.dims))
    for d, (a, b) in enumerate(zip(x.dims, ids.dims, strict=True)):
        if d != at:
            run.proven_equal(f"{term}: dimensions agree", a, b)

    def element(index: Index) -> Normal:
        position = row(run, term, x.dims[at], looked_up(run, term, ids, index))
        return x.element((*index[:at], (position,), *index[at + 1 :]))

    return Tensor(ids.dims, element)


def index(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """x indexed along one dimension."""
    expect(term, len(operands) == 2)
    x, ids = operands
    at = run.position(x.dims, dict(term.attrs)["dim"])

    def element(place: Index) -> Normal:
        inner = place[at : at + len(ids.dims)]
        position = row(run, term, x.dims[at], looked_up(run, term, ids, inner))
        return x.element((*place[:at], (position,), *place[at + len(ids.dims) :]))

    return Tensor((*x.dims[:at], *ids.dims, *x.dims[at + 1 :]), element)


Places = tuple[Position, ...]


def picked(run: Evaluator, term: Apply, dim: Dim, value: Poly, element: Callable[[Places], Normal]) -> Normal:
    """The element at an index along a dimension, 0 where the index is outside."""
    places, stride = list[Position](), polys.ONE
    for digit in reversed(plain(term, dim)):
        at = value if len(dim) == 1 else app("digit", value, stride, digit.size)
        places.insert(0, Position(at, polys.ZERO, digit.size))
        stride = stride * digit.size
    return run.forms.times(run.forms.indicator("in", value, stride), element(tuple(places)))


def pick(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """x[…, ids], 0 where an index is outside."""
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
    """Which indices are not a given number."""
    at = next((i for i, t in enumerate(term.operands) if isinstance(t, Apply) and t.op == "full"), None)
    expect(term, at is not None and len(operands) == 2 and not operands[at].dims)
    ids, attrs = operands[1 - at], dict(term.operands[at].attrs)  # type: ignore[operator, union-attr, index]
    expect(term, "int" in str(attrs["dtype"]))

    def element(index: Index) -> Normal:
        return kept(run, str(attrs["value"]), looked_up(run, term, ids, index))

    return Tensor(ids.dims, element)


def kept(run: Evaluator, ignored: str, value: Poly) -> Normal:
    """1 where an index is not the ignored one."""
    return run.forms.indicator("same", app(f"kept unless {ignored}", value))


def arange(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """0, 1, …, stop - 1."""
    attrs = dict(term.attrs)
    start, stop, step = (run.symbols.number(attrs[key]) for key in ("start", "stop", "step"))
    expect(term, start == polys.ZERO and step == polys.ONE and "int" in str(attrs["dtype"]))
    run.need(f"{term}: not empty", stop - 1)
    dim = _entry(run, attrs["stop"].tree)
    return Tensor((dim,), lambda index: run.forms.size(number(dim, index[0])))


def number(dim: Dim, places: tuple[Position, ...]) -> Poly:
    """A position along a dimension as one number."""
    value = polys.ZERO
    for digit, place in zip(dim, places, strict=True):
        value = value * digit.size + place.value
    return value


def full(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """A constant: an integer over sizes, or a decimal."""
    attrs = dict(term.attrs)
    expect(term, isinstance(attrs["shape"].tree, ast.Tuple))
    value = constant(run, attrs["value"])
    name = attrs["value"].name
    integers = {v.name for root in run.rule.left for t in subterms(root) if isinstance(t, Apply)
                for key, v in t.attrs if key == "ignore_index"}  # fmt: skip
    whole = all(c.denominator == 1 for _, c in value) and (name is None or name in run.symbols.sizes | integers)
    expect(term, whole or "float" in str(attrs.get("dtype", "float")))
    return Tensor(tuple(_entry(run, t) for t in attrs["shape"].tree.elts), lambda index: value)  # type: ignore[attr-defined]


def constant(run: Evaluator, value: Expression) -> Normal:
    """A number, or a name that stands for one."""
    sign, tree = (-1, value.tree.operand) if isinstance(value.tree, ast.UnaryOp) else (1, value.tree)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) and not isinstance(tree.value, bool):
        return run.forms.number(sign * Fraction(str(tree.value)))
    if isinstance(tree, ast.Name) and tree.id not in run.symbols.sizes and tree.id not in run.symbols.solved:
        return run.forms.scaled(run.forms.cell(f"attribute {tree.id}", ()), sign)
    number = run.symbols.number(value)
    return run.forms.size(number) if number.terms else ZERO


MOVES: Rows = {
    "contiguous": identity, "slice": slice_, "concat": concat, "permute": permute, "reshape": reshape, "expand": expand,
    "embedding": embedding, "gather": gather, "index": index, "full": full,
    "pick": pick, "ne": ne, "arange": arange,
}  # fmt: skip
