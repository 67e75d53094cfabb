"""The proof of algebraic rules by index semantics: equal dims, and equal normal forms of all elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from shardwright.substitutions.equations import Equation
from shardwright.substitutions.terms import Term
from shardwright.verifier.algebra import polys
from shardwright.verifier.algebra.elements import (
    Digit,
    Dim,
    Evaluator,
    Index,
    Position,
    Tensor,
    extent,
    spliced,
)
from shardwright.verifier.algebra.lawbook import rested_on
from shardwright.verifier.algebra.polys import poly
from shardwright.verifier.algebra.shapes import evaluator, solved
from shardwright.verifier.proof import Failure, Proof, attempted


def prove_equation(rule: Equation) -> Failure | None:
    """Return None if the rule is proven for all sizes and ranks, else the failure."""
    return prove_terms(rule, rule.left, rule.right).failure


def prove_terms(rule: Equation, left: Sequence[Term], right: Sequence[Term]) -> Proof:
    """Prove terms over the rule's variables equal, wherever the left ones are well-formed.

    The axioms are the laws that were applied and the facts on which they rest.
    """
    return attempted(lambda: _proof(rule, left, right))


def _proof(rule: Equation, left: Sequence[Term], right: Sequence[Term]) -> Proof:
    symbols = solved(rule, left)
    run = evaluator(rule, symbols)
    failure = _failure(run, left, right)
    if failure is not None and not failure.refuted and run.cuts:
        run = replace(evaluator(rule, symbols), cuts=run.cuts, use_cuts=True)
        failure = _failure(run, left, right)
    return Proof(failure=failure) if failure else Proof(rested_on({"index-semantics", *run.forms.used}))


def _failure(run: Evaluator, left: Sequence[Term], right: Sequence[Term]) -> Failure | None:
    ours = [run.tensor(root) for root in left]
    run.assuming = False
    theirs = [run.tensor(root) for root in right]
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if (failure := _unequal(f"root {number}", a, b, run)) is not None:
            return failure
    return None


def _unequal(title: str, left: Tensor, right: Tensor, run: Evaluator) -> Failure | None:
    if len(left.dims) != len(right.dims):
        return Failure(f"{title}: {len(left.dims)} dimensions against {len(right.dims)}")
    dims: list[Dim] = []
    for number, (a, b) in enumerate(zip(left.dims, right.dims, strict=True)):
        if spliced(a) or spliced(b):
            if not spliced(a) or not spliced(b):
                return Failure(f"{title}: dimension {number} is a splice on one side only")
            if spliced(a) != spliced(b):
                return Failure(f"{title}: dimension {number} is {spliced(a)} on one side, {spliced(b)} on the other")
            dims.append(a)
            continue
        if not run.symbols.equals(extent(a), extent(b)):
            return run.symbols.failure(f"{title}: size of dimension {number}", "==", extent(a) - extent(b))
        dims.append(run.common(f"{title}: dimension {number}", a, b))
    for index in _cases(run, dims):
        if not run.agree(left, right, index):
            return Failure(f"{title}: elements differ")
    return None


def _cases(run: Evaluator, dims: Sequence[Dim]) -> Iterator[Index]:
    """Yield a free index in every combination of segments."""
    return product(*(
        product(*(_digit_cases(run, f"@{number}.{at}", digit) for at, digit in enumerate(dim)))
        for number, dim in enumerate(dims)
    ))  # fmt: skip


def _digit_cases(run: Evaluator, name: str, digit: Digit) -> list[Position]:
    if digit.splice:
        return [Position(poly(name), polys.ZERO, polys.ZERO)]
    return [Position(s + poly(name), s, s + n) for s, n in run.segments(digit)]
