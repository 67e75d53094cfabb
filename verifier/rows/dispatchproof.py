"""What a dispatch claims beside the split that it is made of: rows that are sent to what they name, and back.

A dispatch "e>t" has tokens t and experts e split along one axis. Tokens where the split along e wants copies are
combined and replicated, that split is run, and its partial sums are reduced to slices of tokens:

    op(S(t), S(e)) : S(t)   =   reduce_scatter ∘ op(gather_copy(…), S(e)) : P

Its parts are proven: the split along e as any row rule, the two moves as step rules, forward and, as they are each
other's adjoints, backward. Layouts have to be those of t and e alone. That only rows which name an expert of a device
need be sent there takes two facts more: t counts rows of all that is sent and of the result, so that a row is made of
a row; and a row adds nothing where it does not name the expert.
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
"""What the proofs of these moves rest on."""


def broken(rule: RowRule, split: RowRule) -> Iterator[Failure]:
    """What a dispatch claims and does not follow from `split`, its rule along what is named."""
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
    """Whether slices of rows become the copy, or come from the partial sum, that the split has."""
    return mine.kind == "S" and wanted.kind in "CP" and (rows,) in dims and holds_alone(dims, mine, rows)


def _not_alone(rule: RowRule) -> Iterator[Failure]:
    """A row that does not name an expert has to add nothing there."""
    if rule.row not in BODIES:
        yield Failure(f"what {rule.row} adds to a row that does not name the expert is not known")
        return
    cells = [z3.Real(f"x{i}") for i in range(len(rule.operands))]
    (index,) = ROWS[rule.row].indexes
    claim, others = BODIES[rule.row](cells) == 0, [cells[index] != z3.Real("position")]
    if not is_valid(claim, others):
        yield refute("a row adds nothing to what it does not name", claim, others, [])
