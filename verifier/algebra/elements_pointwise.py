"""Index semantics of the rows that act on each element; dimensions of the literal size 1 are broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.terms import Apply
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import (
    Dim,
    Evaluator,
    Index,
    Rows,
    Semantics,
    Tensor,
    expect,
    is_bool,
    shown,
    spliced,
)
from shardwright.verifier.algebra.monomials import INDICATORS, ONE, Normal, total_normal
from shardwright.verifier.algebra.polys import Poly

Merge = Callable[[Evaluator, Normal, Normal], Normal]


def broadcast(run: Evaluator, title: str, left: Sequence[Dim], right: Sequence[Dim]) -> tuple[Dim, ...]:
    """The dims that both have together, aligned at their ends."""
    long, short = (left, right) if len(left) >= len(right) else (right, left)
    lead = len(long) - len(short)
    found = list(long[:lead])
    for a, b in zip(long[lead:], short, strict=True):
        if (not a and spliced(b)) or (not b and spliced(a)):
            raise RuleError(f"{title}: dimension {shown(a)} against {shown(b)}")
        found.append(a or b if not a or not b else run.proven_equal(f"{title}: dimensions agree", a, b))
    return tuple(found)


def read(x: Tensor, index: Index) -> Normal:
    """The element of an operand that a result at this index is computed from."""
    own = index[len(index) - len(x.dims) :]
    return x.element(tuple(place if dim else () for dim, place in zip(x.dims, own, strict=True)))


def binary(merge: Merge) -> Semantics:
    """A row that merges two elements."""

    def semantics(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
        expect(term, len(operands) == 2)
        x, y = operands
        dims = broadcast(run, str(term), x.dims, y.dims)
        return Tensor(dims, lambda index: merge(run, read(x, index), read(y, index)))

    return semantics


def unary(name: str) -> Semantics:
    """A row that is a function of one element."""

    def semantics(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
        (x,) = operands
        title = " ".join([name, *(f"{key}={value}" for key, value in term.attrs)])
        return Tensor(x.dims, lambda index: run.forms.function(title, x.element(index)))

    return semantics


def neg(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """-x."""
    (x,) = operands
    return Tensor(x.dims, lambda index: run.forms.scaled(x.element(index), -1))


def _maximum(run: Evaluator, x: Normal, y: Normal) -> Normal:
    return run.forms.maximum([((), x), ((), y)])


def _minimum(run: Evaluator, x: Normal, y: Normal) -> Normal:
    forms = run.forms
    forms.used.add("minimum")
    return forms.scaled(forms.maximum([((), forms.scaled(x, -1)), ((), forms.scaled(y, -1))]), -1)


def detach(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Any tensor of these dims: a rule with it then holds for the value and, as it has no gradient, for gradients."""
    (x,) = operands

    def element(index: Index) -> Normal:
        expect(term, total_normal(x.element(index)))  # it must exist, whatever it is
        return run.forms.cell(f"any {term}", [p.value for dim in index for p in dim])

    return Tensor(x.dims, element)


def _le(run: Evaluator, x: Normal, y: Normal) -> Normal:
    return run.forms.indicator("ge", integer(y) - integer(x))


def integer(normal: Normal) -> Poly:
    """A form that is an integer made of sizes and positions."""
    total = polys.ZERO
    for monomial, coefficient in normal:
        if coefficient.denominator != 1 or any(f.kind != "size" or e < 0 or e != int(e) for f, e in monomial):
            raise RuleError("a comparison of what is not known to be integers")
        powers = (f.parts[0] for f, e in monomial for _ in range(int(e)))
        total = total + polys.product(powers) * int(coefficient)  # type: ignore[arg-type]
    return total


def where(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """c·x + (1 - c)·y, c being 0 or 1. What is not chosen need not exist, which the product would ask for."""
    expect(term, len(operands) == 3)
    expect(term, is_bool(term.operands[0]))
    c, x, y = operands
    dims = broadcast(run, str(term), broadcast(run, str(term), c.dims, x.dims), y.dims)
    forms = run.forms

    def element(index: Index) -> Normal:
        condition = read(c, index)
        expect(
            term, len(condition) <= 1 and all(k == 1 and all(f.kind in INDICATORS for f, _ in m) for m, k in condition)
        )
        chosen, other = read(x, index), read(y, index)
        expect(term, total_normal(chosen) and total_normal(other))
        otherwise = forms.add(ONE, forms.scaled(condition, -1))
        return forms.add(forms.times(condition, chosen), forms.times(otherwise, other))

    return Tensor(dims, element)


_UNARY = (
    "abs", "cos", "erf", "exp", "gelu", "log", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "softplus",
    "sqrt", "tanh",
)  # fmt: skip
POINTWISE: Rows = {
    **{name: unary(name) for name in _UNARY},
    "neg": neg,
    "detach": detach,
    "where": where,
    "le": binary(_le),
    "add": binary(lambda run, x, y: run.forms.add(x, y)),
    "sub": binary(lambda run, x, y: run.forms.add(x, run.forms.scaled(y, -1))),
    "mul": binary(lambda run, x, y: run.forms.times(x, y)),
    "div": binary(lambda run, x, y: run.forms.times(x, run.forms.reciprocal(y))),
    "pow": binary(lambda run, x, y: run.forms.function("pow", x, y)),
    "maximum": binary(_maximum),
    "minimum": binary(_minimum),
}
"""Nonlinear functions without laws are known by their arguments alone."""
