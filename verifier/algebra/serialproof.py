"""Proves algebraic rules by index semantics: equal dims, and equal normal forms of all elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from shardwright.pcg.errors import RuleError
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
from shardwright.verifier.algebra.elements_rows import evaluator
from shardwright.verifier.algebra.lawbook import rested_on
from shardwright.verifier.algebra.polys import poly
from shardwright.verifier.algebra.symbols import Symbols
from shardwright.verifier.proof import Failure, Proof, attempted

MAX_ROUNDS = 6


def prove_equation(rule: Equation) -> Failure | None:
    """None if the rule is proven for all sizes and ranks; otherwise what broke."""
    return prove_terms(rule, rule.left, rule.right).failure


def prove_terms(rule: Equation, left: Sequence[Term], right: Sequence[Term]) -> Proof:
    """Prove terms over the rule's variables equal, wherever the left ones are well-formed.

    The axioms are the laws that were applied and the facts that they rest on.
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


def known(rule: Equation) -> Symbols:
    """What the rule's guard says about its sizes."""
    if bound := rule.bound & set(rule.parameters):  # an attribute may be negative, a parameter may not
        raise RuleError(f"{min(bound)!r} is bound by the left side, and no parameter")
    symbols = Symbols(set(rule.sizes))
    for condition in rule.guard:
        if not condition.names & set(rule.axes):  # what degrees divide says nothing about logical tensors
            symbols.assume(condition)
    return symbols


def solved(rule: Equation, left: Sequence[Term]) -> Symbols:
    """As `known`, with the equations that make the left side well-formed used as substitutions."""
    symbols = known(rule)
    for _ in range(MAX_ROUNDS):
        run = evaluator(rule, symbols)
        for root in left:
            run.tensor(root)
        before = dict(symbols.solved)
        for a, b in run.equations:
            _equate(symbols, a, b)
        if symbols.solved == before:
            return symbols
    raise RuleError("the sizes of the left side do not settle")


def _equate(symbols: Symbols, left: Dim, right: Dim) -> None:
    for one, other in ((left, right), (right, left)):
        if extent(one).name is not None:
            symbols.equal(extent(one), extent(other), tuple(d.size for d in other))
            return
    symbols.equal(extent(left), extent(right))


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
    """A free index in every combination of segments."""
    choices = [list(_dim_cases(run, number, dim)) for number, dim in enumerate(dims)]
    yield from product(*choices)


def _dim_cases(run: Evaluator, number: int, dim: Dim) -> Iterator[tuple[Position, ...]]:
    options = [_digit_cases(run, f"@{number}.{at}", digit) for at, digit in enumerate(dim)]
    yield from product(*options)


def _digit_cases(run: Evaluator, name: str, digit: Digit) -> list[Position]:
    if digit.splice:
        return [Position(poly(name), polys.ZERO, polys.ZERO)]
    return [Position(s + poly(name), s, s + n) for s, n in run.segments(digit)]
