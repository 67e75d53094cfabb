"""The claims of a ring beyond its split: operands travel in parts, and what the parts give is merged.

A ring "q@k" has queries q and keys k split along one axis. Gathering the keys first gives the split along q:

    op(S(q), S(k), S(k)) : S(q)   =   op(S(q), gather_copy(…) : C, gather_copy(…) : C) : S(q)

The parts are proven: the split along q as any row rule, and the move as a step rule, forward and, as it is the adjoint
of a sum that is scattered, backward. Layouts must be those of q and k alone.

A device need never have all keys at once, because of one more fact: the operator is a mean of values along k, whose
weights are each of one key alone, also under a mask. Means over parts merge to the mean over all (lemma
`merged-means`). Given the whole mean and the sum of all weights, the gradients of a weight and of a value depend on
that key alone, so each part gives its own. Gradients of queries add up over keys, and those of keys over devices.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.pcg.optable import ROWS
from shardwright.pcg.ring import Ring
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import FactorDims
from shardwright.substitutions.rules.rowrules import RowRule, signature_of
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier.proof import Failure
from shardwright.verifier.rows.claims import holds_alone
from shardwright.verifier.rows.stepproof import prove_steps

LEMMAS = ("digits", "linear-sum", "split-sum", "merged-means", "index-semantics")
"""What the proofs rest on beyond the split's: the move, the merge, and that the row computes a mean."""
MEANS = frozenset({"sdpa"})
"""The rows that are Σ_j w_j v_j / Σ_j w_j over the keys j by their index semantics (`verifier/reals/reals_sums.py`)."""


def broken(rule: RowRule, split: RowRule) -> Iterator[Failure]:
    """Yield the claims of a ring that do not follow from `split`, the rule of its split along the queries."""
    pattern, choice = rule.shapes(), rule.choice
    queries, keys = choice.factors
    if choice not in tuple(Ring.offered(ROWS[rule.row], signature_of(pattern))):
        yield Failure(f"operands of {rule.row} do not travel along {keys} past its queries {queries}")
        return
    if rule.row not in MEANS:
        yield Failure(f"what {rule.row} gives for parts of its keys is not known to merge")
        return
    if rule.local != split.local:
        yield Failure(f"the local operator is told {list(rule.local)}, split along {queries} {list(split.local)}")
    pairs = zip(rule.operands, split.operands, strict=True)
    for number, (dims, (mine, wanted)) in enumerate(zip(pattern.operands, pairs, strict=True)):
        if not (_is_gathered(mine, dims, keys) if number in ROWS[rule.row].travels else mine == wanted):
            yield Failure(f"operand {number} is {mine}, which does not become {wanted} around the ring", ill_typed=True)
    if rule.result != split.result:
        yield Failure(f"the result is {rule.result}, split along {queries} it is {split.result}", ill_typed=True)
    yield from (failure for name in choice.moves if (failure := prove_steps(STEP_RULES[name])) is not None)


def _is_gathered(mine: Placement, dims: FactorDims, keys: str) -> bool:
    """Return whether a device has its part of the keys, and of nothing else."""
    return mine.kind == "S" and dims[mine.dim][-1:] == (keys,) and holds_alone(dims, mine, keys)
