"""The claims of a dispatch beyond its split: rows are sent to the ranks with the items they name, and back.

A dispatch "e>t" has tokens t and experts e split along one axis. Where the split along e needs copies of tokens, these
are combined and replicated. Then the split runs, and its partial sums are reduced to slices of tokens:

    op(S(t), S(e)) : S(t)   =   reduce_scatter ∘ op(gather_copy(…), S(e)) : P

The parts are proven: the split along e as any row rule, and the two moves as step rules, forward and, as they are each
other's adjoints, backward. Layouts must be those of t and e alone. A device needs only the rows that name one of its
experts, because of two more facts: t counts the rows of everything that is sent and of the result, so each result row
depends on one row; and a row adds nothing for an expert that it does not name.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.pcg.dispatch import Sent
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import FactorDims
from shardwright.substitutions.rules.rowrules import RowRule, signature_of
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier.logic import z3
from shardwright.verifier.proof import Failure
from shardwright.verifier.rows.claims import holds_alone
from shardwright.verifier.rows.semantics import BODIES
from shardwright.verifier.rows.stepproof import prove_steps
from shardwright.verifier.solver import is_valid, refute

LEMMAS = ("digits", "linear-sum")
"""The lemmas on which the proofs of these moves rest."""


def broken(rule: RowRule, split: RowRule) -> Iterator[Failure]:
    """Yield the claims of a dispatch that do not follow from `split`, the rule of its split along the named factor."""
    pattern, choice = rule.shapes(), rule.choice
    named, rows = choice.factors
    if choice not in tuple(Sent.offered(ROWS[rule.row], signature_of(pattern))):
        yield Failure(f"rows of {rule.row} are not counted by {rows} and sent by what they name along {named}")
        return
    if rule.local != split.local:
        yield Failure(f"the local operator is told {list(rule.local)}, split along {named} {list(split.local)}")
    titles = (*(f"operand {number}" for number in range(len(rule.operands))), "the result")
    pairs = zip((*rule.operands, rule.result), (*split.operands, split.result), strict=True)
    for title, dims, (mine, wanted) in zip(titles, pattern.tensors, pairs, strict=True):
        if not (_is_moved(mine, wanted, dims, rows) if wanted.kind in "CP" else mine == wanted):
            yield Failure(f"{title} is {mine}, from which no move along {rows} leads to {wanted}", ill_typed=True)
    yield from (failure for name in choice.moves if (failure := prove_steps(STEP_RULES[name])) is not None)
    yield from _not_alone(rule)


def _is_moved(mine: Placement, wanted: Placement, dims: FactorDims, rows: str) -> bool:
    """Return whether slices of rows become the split's copy, or come from its partial sum."""
    return mine.kind == "S" and wanted.kind in "CP" and (rows,) in dims and holds_alone(dims, mine, rows)


def _not_alone(rule: RowRule) -> Iterator[Failure]:
    """Yield a failure unless a row adds nothing for an expert that it does not name."""
    if rule.row not in BODIES:
        yield Failure(f"what {rule.row} adds to a row that does not name the expert is not known")
        return
    cells = [z3.Real(f"x{i}") for i in range(len(rule.operands))]
    (index,) = ROWS[rule.row].indexes
    claim, others = BODIES[rule.row](cells) == 0, [cells[index] != z3.Real("position")]
    if not is_valid(claim, others):
        yield refute("a row adds nothing to what it does not name", claim, others, [])
