"""Index semantics: every row of the op table computes a sum over digits of an uninterpreted body.

    result[m] = Σ_s body(x_0[m, s], x_1[m, s], …)        m: digits of map factors, s: digits of summed factors

An operand's *cell* at given digits is a function of its fixed factors' digits, and so is the result's: layer_norm maps
a row to a row. The body is uninterpreted; `Body` has the known facts. The *adjoint* of operand j follows by the chain
rule and has the same form, with the gradient dy of the result as one more operand:

    gradient_j[digits of operand j] = Σ_{all other digits} ∂_j body(x_0, x_1, …) · dy[m]

∂_j body · dy is linear in dy. If the body is jointly linear in the operands J, then ∂_j body · dy does not depend on
x_J for j in J, and is linear in x_J for j outside J.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwright.pcg.optable import ROWS
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import RowRule, offset_factor
from shardwright.verifier.logic import Number, z3


@dataclass(frozen=True, slots=True)
class Body:
    """The known facts about a body.

    positions  factors whose global digit the body sees: its place in a random draw, the number of a vocabulary entry
    linear     sets of operands in which it is jointly linear
    ignores    operands on which it does not depend
    """

    positions: tuple[str, ...] = ()
    linear: tuple[frozenset[int], ...] = ()
    ignores: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class IndexTerm:
    """A semantic term with the layouts that a rule claims for it, which is to be proven."""

    title: str
    pattern: Pattern
    body: Body
    operands: tuple[Placement, ...]
    result: Placement


def forward(rule: RowRule) -> IndexTerm:
    """Return the claim about the operator itself."""
    return IndexTerm("forward", rule.shapes(), _body(rule), rule.operands, rule.result)


def adjoint(rule: RowRule, operand: int) -> IndexTerm:
    """Return the claim about the gradient of one operand: dual layouts, and the same operands as in forward."""
    pattern, body = rule.shapes(), _body(rule)
    dy = len(pattern.operands)
    turned = Pattern((*pattern.operands, pattern.result), pattern.operands[operand], pattern.fixed)
    linear = [s for s in body.linear if operand not in s]
    ignores = [s for s in body.linear if operand in s]
    derived = Body(body.positions, (frozenset([dy]), *linear), frozenset[int]().union(*ignores))
    placements = (*rule.operands, rule.result.dual)
    return IndexTerm(f"gradient of operand {operand}", turned, derived, placements, rule.operands[operand].dual)


def terms(rule: RowRule) -> Iterator[IndexTerm]:
    """Yield all claims of a rule: about the operator, and about the gradient of every operand."""
    yield forward(rule)
    yield from (adjoint(rule, operand) for operand in range(len(rule.operands)))


def _body(rule: RowRule) -> Body:
    row, pattern = ROWS[rule.row], rule.shapes()
    offset = offset_factor(row, pattern)
    positions = pattern.splittable if row.random else (offset,) if offset is not None else ()
    return Body(positions, tuple(frozenset(s) for s in row.linear_in))


def _first(x: list[Number]) -> Number:
    return x[0]


_hidden = z3.Function("hidden", z3.RealSort(), z3.RealSort(), z3.RealSort())

BODIES: dict[str, Callable[[list[Number]], Number]] = {
    **dict.fromkeys(("cast", "detach", "reshape", "permute", "expand", "slice", "contiguous", "sum", "flip"), _first),
    **dict.fromkeys(("linear", "matmul", "mul"), lambda x: x[0] * x[1]),
    "neg": lambda x: -x[0],
    "add": lambda x: x[0] + x[1],
    "sub": lambda x: x[0] - x[1],
    "div": lambda x: x[0] / x[1],
    "where": lambda x: z3.If(x[0] != 0, x[1], x[2]),
    "expert_linear": lambda x: z3.If(x[2] == z3.Real("position"), x[0] * x[1], z3.RealVal(0)),
    "experts": lambda x: z3.If(x[1] == z3.Real("position"), x[2] * _hidden(x[0], x[3]) * x[4], z3.RealVal(0)),
    "scatter_sum": lambda x: z3.If(x[0] == z3.Real("position"), x[1], z3.RealVal(0)),
    **dict.fromkeys(("embedding", "pick"), lambda x: z3.If(x[1] == z3.Real("position"), x[0], z3.RealVal(0))),
}
"""The bodies that are written out, for cells that are numbers; their linearity is proven, not taken from the row."""
