"""The rows that algebraic rules may use, with their index semantics."""

from __future__ import annotations

from shardwright.substitutions.equations import Equation
from shardwright.verifier.algebra.elements import Evaluator, Rows
from shardwright.verifier.algebra.elements_lookups import LOOKUPS
from shardwright.verifier.algebra.elements_moves import MOVES
from shardwright.verifier.algebra.elements_pointwise import POINTWISE
from shardwright.verifier.algebra.elements_sums import SUMS
from shardwright.verifier.algebra.laws import Laws
from shardwright.verifier.algebra.symbols import Symbols

SEMANTICS: Rows = {**POINTWISE, **MOVES, **LOOKUPS, **SUMS}


def evaluator(rule: Equation, symbols: Symbols) -> Evaluator:
    """Evaluates terms of a rule, with normal forms of its own."""
    return Evaluator(rule, symbols, Laws(symbols.is_positive), SEMANTICS)
