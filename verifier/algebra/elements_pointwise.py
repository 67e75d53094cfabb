"""Index semantics of the rows that act on each element; dimensions of the literal size 1 are broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from inspect import signature

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
from shardwright.verifier.algebra.laws import Laws
from shardwright.verifier.algebra.monomials import INDICATORS, ONE, Normal, total_normal
from shardwright.verifier.algebra.polys import Poly

Merge = Callable[..., Normal]
"""A function of the laws of forms and of elements, one of each operand, that returns the result's element."""


def broadcast(run: Evaluator, title: str, left: Sequence[Dim], right: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the dims that both have together, aligned at their ends."""
    long, short = (left, right) if len(left) >= len(right) else (right, left)
    lead = len(long) - len(short)
    dims = list(long[:lead])
    for a, b in zip(long[lead:], short, strict=True):
        if (not a and spliced(b)) or (not b and spliced(a)):
            raise RuleError(f"{title}: dimension {shown(a)} against {shown(b)}")
        dims.append(a or b if not a or not b else run.proven_equal(f"{title}: dimensions agree", a, b))
    return tuple(dims)


def read(x: Tensor, index: Index) -> Normal:
    """Return the element of an operand from which the result at this index is computed."""
    suffix = index[len(index) - len(x.dims) :]
    return x.element(tuple(place if dim else () for dim, place in zip(x.dims, suffix, strict=True)))


def _dims(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> tuple[Dim, ...]:
    """Return the dims that all operands have together."""
    return reduce(partial(broadcast, run, str(term)), (x.dims for x in operands))


def pointwise(merge: Merge) -> Semantics:
    """Return the semantics of a row that computes an element from one element of each operand."""

    def semantics(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
        expect(term, len(operands) == len(signature(merge).parameters) - 1)
        return Tensor(_dims(run, term, operands), lambda index: merge(run.forms, *(read(x, index) for x in operands)))

    return semantics


def function(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate a function of one element, known by its name and attributes."""
    (x,) = operands
    title = " ".join([term.op, *(f"{key}={value}" for key, value in term.attrs)])
    return Tensor(x.dims, lambda index: run.forms.function(title, x.element(index)))


def _maximum(forms: Laws, x: Normal, y: Normal) -> Normal:
    return forms.maximum([((), x), ((), y)])


def _minimum(forms: Laws, x: Normal, y: Normal) -> Normal:
    forms.used.add("minimum")
    return forms.scaled(_maximum(forms, forms.scaled(x, -1), forms.scaled(y, -1)), -1)


def detach(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Return an arbitrary tensor of these dims: a rule that holds for all of them holds for values and gradients."""
    (x,) = operands

    def element(index: Index) -> Normal:
        expect(term, total_normal(x.element(index)))  # the element must exist, whatever its value
        return run.forms.cell(f"any {term}", [p.value for dim in index for p in dim])

    return Tensor(x.dims, element)


def integer(normal: Normal) -> Poly:
    """Return a form that is an integer made of sizes and positions as a polynomial."""
    total = polys.ZERO
    for monomial, coefficient in normal:
        if coefficient.denominator != 1 or any(f.kind != "size" or e < 0 or e != int(e) for f, e in monomial):
            raise RuleError("a comparison of what is not known to be integers")
        powers = (f.parts[0] for f, e in monomial for _ in range(int(e)))
        total = total + polys.product(powers) * int(coefficient)  # type: ignore[arg-type]
    return total


def where(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    """Evaluate c·x + (1 - c)·y for c in {0, 1}. The element not chosen need not exist, unlike in the product."""
    expect(term, len(operands) == 3)
    expect(term, is_bool(term.operands[0]))
    (c, x, y), forms = operands, run.forms

    def element(index: Index) -> Normal:
        condition = read(c, index)
        expect(
            term, len(condition) <= 1 and all(k == 1 and all(f.kind in INDICATORS for f, _ in m) for m, k in condition)
        )
        chosen, other = read(x, index), read(y, index)
        expect(term, total_normal(chosen) and total_normal(other))
        otherwise = forms.add(ONE, forms.scaled(condition, -1))
        return forms.add(forms.times(condition, chosen), forms.times(otherwise, other))

    return Tensor(_dims(run, term, operands), element)


_FUNCTIONS = (
    "abs", "cos", "erf", "exp", "gelu", "log", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "softplus",
    "sqrt", "tanh",
)  # fmt: skip
POINTWISE: Rows = {
    **dict.fromkeys(_FUNCTIONS, function),
    "detach": detach,
    "where": where,
    "contiguous": pointwise(lambda forms, x: x),
    "neg": pointwise(lambda forms, x: forms.scaled(x, -1)),
    "le": pointwise(lambda forms, x, y: forms.indicator("ge", integer(y) - integer(x))),
    "add": pointwise(lambda forms, x, y: forms.add(x, y)),
    "sub": pointwise(lambda forms, x, y: forms.add(x, forms.scaled(y, -1))),
    "mul": pointwise(lambda forms, x, y: forms.times(x, y)),
    "div": pointwise(lambda forms, x, y: forms.times(x, forms.reciprocal(y))),
    "pow": pointwise(lambda forms, x, y: forms.function("pow", x, y)),
    "maximum": pointwise(_maximum),
    "minimum": pointwise(_minimum),
}
"""The semantics of pointwise rows. Nonlinear functions without laws are known by their arguments alone."""
