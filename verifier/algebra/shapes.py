"""The common base of both proofs of a serial rule: its sizes, and the dims of its well-formed terms.

The first proof takes elements from here, too; the second one defines them independently (`verifier/reals`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.terms import Term
from shardwright.verifier.algebra.elements import Dim, Evaluator, Rows, extent
from shardwright.verifier.algebra.elements_lookups import LOOKUPS
from shardwright.verifier.algebra.elements_moves import MOVES
from shardwright.verifier.algebra.elements_pointwise import POINTWISE
from shardwright.verifier.algebra.elements_sums import SUMS
from shardwright.verifier.algebra.laws import Laws
from shardwright.verifier.algebra.symbols import Symbols

MAX_ROUNDS = 6
SEMANTICS: Rows = {**POINTWISE, **MOVES, **LOOKUPS, **SUMS}


def evaluator(rule: Equation, symbols: Symbols) -> Evaluator:
    """Return an evaluator of a rule's terms, with its own normal forms."""
    return Evaluator(rule, symbols, Laws(symbols.is_positive), SEMANTICS)


def known(rule: Equation) -> Symbols:
    """Return the facts of the rule's guard about its sizes."""
    if bound := rule.bound & set(rule.parameters):  # an attribute may be negative, a parameter is at least 1
        raise RuleError(f"{min(bound)!r} is bound by the left side, and no parameter")
    symbols = Symbols(set(rule.sizes))
    for condition in rule.guard:
        if not condition.names & set(rule.axes):  # divisibility by degrees says nothing about logical tensors
            symbols.assume(condition)
    return symbols


def solved(rule: Equation, left: Sequence[Term]) -> Symbols:
    """Return `known(rule)` with the equations that make the left side well-formed used as substitutions."""
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
