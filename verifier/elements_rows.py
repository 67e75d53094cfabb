"""The rows that algebraic rules may use, with their index semantics."""

from __future__ import annotations

from shardwright.verifier.elements import Rows
from shardwright.verifier.elements_moves import MOVES
from shardwright.verifier.elements_pointwise import POINTWISE
from shardwright.verifier.elements_sums import SUMS

SEMANTICS: Rows = {**POINTWISE, **MOVES, **SUMS}
