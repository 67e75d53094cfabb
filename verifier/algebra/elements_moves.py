"""Index semantics of rows that only move elements."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import (
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
from shardwright.verifier.algebra.monomials import Normal
from shardwright.verifier.algebra.polys import Poly, app, poly


def slice_(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate a slice of the major digit; its bounds are multiples of the other digits' product."""
    (x,), attrs = operands, dict(term.attrs)
    at = run.position(x.dims, attrs["dim"])
    dim = plain(term, x.dims[at])
    bounds = [run.symbols.number(attrs[key].tree) for key in ("start", "stop")]
    expect(term, run.symbols.number(attrs["step"].tree) == polys.ONE)
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
        return x.element((*index[:at], _moved(dim, index[at], start), *index[at + 1 :]))

    return Tensor((*x.dims[:at], (Digit(_inherited(major, start, size)), *rest), *x.dims[at + 1 :]), element)


def _moved(dim: Dim, places: tuple[Position, ...], by: Poly) -> tuple[Position, ...]:
    """Return the place along an operand's dimension, shifted along the major digit."""
    return (Position(*(p + by for p in places[0])), *places[1:]) if dim else ()


def _inherited(digit: Digit, start: Poly, size: Poly) -> tuple[Poly, ...]:
    """Return the segments of a slice: if its bounds are cuts, the segments of the whole that lie within it."""
    starts = list(digit.starts)
    if start in starts and start + size in starts and starts.index(start) < starts.index(start + size):
        return digit.segments[starts.index(start) : starts.index(start + size)]
    return (size,)


def concat(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate pieces one after the other along the major digit; an index without a known piece reads all of them."""
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
        moved = _moved(operands[number].dims[at], index[at], starts[number] * -1)
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
    """Evaluate a permutation: the element at the permuted index."""
    (x,), dims = operands, dict(term.attrs)["dims"]
    if isinstance(dims.tree, ast.Tuple):
        order = [_place(run, term, x, tree) for tree in dims.tree.elts]
        expect(term, sorted(order) == list(range(len(x.dims))))
        inverse = [order.index(d) for d in range(len(order))]
        return Tensor(tuple(x.dims[d] for d in order), lambda index: x.element(tuple(index[d] for d in inverse)))
    expect(term, len(x.dims) == 1 and bool(spliced(x.dims[0])))
    p = run.symbols.attribute(dims.tree)
    name, _, before = spliced(x.dims[0]).partition(" by ")
    chain = " ".join([*before.split(), *polys.composed(p)])
    run.forms.used.add("permutations")
    return Tensor(
        ((Digit(splice=f"{name} by {chain}" if chain else name),),),
        lambda index: x.element(((_opaque(app("at", p, index[0][0].value)),),)),
    )


def _place(run: Evaluator, term: Apply, x: Tensor, tree: ast.expr) -> int:
    """Return the dimension that an entry of a permutation names; `*iota(len(b))` is the leading splice b itself."""
    if isinstance(tree, ast.Starred):
        expect(term, bool(x.dims) and ast.unparse(tree.value) == f"iota(len({spliced(x.dims[0])}))")
        return 0
    return run.position(x.dims, Expression(ast.unparse(tree)))


def _opaque(value: Poly) -> Position:
    return Position(value, polys.ZERO, polys.ZERO)


def reshape(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate a reshape, which regroups digits; a digit that is a product of extents is read at Σ place · stride."""
    (x,), shape = operands, dict(term.attrs)["shape"]
    if shape.name is not None or not isinstance(shape.tree, ast.Tuple):
        expect(term, len(x.dims) == 1 and bool(spliced(x.dims[0])) and shape.name is not None)
        before, after = poly(f"shape {spliced(x.dims[0])}"), poly(f"shape {shape}")
        if shape.name == spliced(x.dims[0]):
            return x
        run.forms.used.add("row-major")
        return Tensor(
            ((Digit(splice=str(shape)),),),
            lambda index: x.element(((_opaque(app("unflat", before, app("flat", after, index[0][0].value))),),)),
        )
    dims = _grouped(run, term, [digit for dim in x.dims for digit in dim], shape.tree.elts)

    def element(index: Index) -> Normal:
        new = (pair for dim, places in zip(dims, index, strict=True) for pair in zip(dim, places, strict=True))
        return x.element(tuple(tuple(_joined(digit, new) for digit in dim) for dim in x.dims))

    return Tensor(tuple(dims), element)


def _grouped(run: Evaluator, term: Apply, digits: Sequence[Digit], entries: Sequence[ast.expr]) -> list[Dim]:
    """Return each extent of the new shape as digits."""
    pending, groups = list(digits), list[Dim]()
    left: Poly | None = None
    for tree in entries:
        if isinstance(tree, ast.Starred):
            expect(term, bool(pending) and pending[0].splice == ast.unparse(tree.value) and left is None)
            groups.append((pending.pop(0),))
            continue
        want = polys.product(run.symbols.entry(tree))
        splits = pending and not pending[0].splice and want not in (polys.ONE, pending[0].size)
        if left is None and splits and pending[0].size.over(want) is not None:  # a digit that several extents share
            left = pending[0].size
        if left is not None:
            rest = left.over(want)
            expect(term, rest is not None)
            left = None if rest == polys.ONE else rest
            groups.append(entry(run, tree))
            if left is None:
                pending.pop(0)
            continue
        taken: list[Digit] = []
        while polys.product(d.size for d in taken) != want:
            expect(term, bool(pending) and not pending[0].splice)
            taken.append(pending.pop(0))
        groups.append(tuple(taken))
    expect(term, left is None and all(d.size == polys.ONE and not d.splice for d in pending))
    return groups


def _joined(digit: Digit, new: Iterator[tuple[Digit, Position]]) -> Position:
    """Return the position along an operand's digit, from one digit of the new shape or from several that share it."""
    first, place = next(new, (digit, Position(polys.ZERO, polys.ZERO, polys.ONE)))
    if first == digit:
        return place
    value, size = place.value, first.size
    while size != digit.size:
        following, place = next(new)
        value, size = value * following.size + place.value, size * following.size
    return Position(value, polys.ZERO, size)


def expand(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate an expansion: the element at the dimensions that the operand has."""
    (x,), shape = operands, dict(term.attrs)["shape"]
    expect(term, isinstance(shape.tree, ast.Tuple))
    dims = tuple(entry(run, tree) for tree in shape.tree.elts)  # type: ignore[attr-defined]
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


def entry(run: Evaluator, tree: ast.expr) -> Dim:
    """Return a dimension from an extent of a shape."""
    if isinstance(tree, ast.Starred):
        return (Digit(splice=ast.unparse(tree.value)),)
    return tuple(Digit((size,)) for size in run.symbols.entry(tree))


MOVES: Rows = {
    "slice": slice_,
    "concat": concat,
    "permute": permute,
    "reshape": reshape,
    "expand": expand,
}
