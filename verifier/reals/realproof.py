"""A second proof of serial rules: elements as real numbers with sums, decided by Z3.

Both sides are evaluated at one free index, operator by operator, to Z3 expressions over the elements of the variables;
`numbersums` names their sums. Z3's arithmetic replaces laws of the normal forms: products multiplied out, terms
collected, pieces of concatenations, relu, |x|, maxima of two. The rows are defined once more, by elements. Only dims
are shared with the first proof: the dimensions of terms, and the well-formedness of operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardwright.pcg.errors import ShardwrightError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.terms import Term
from shardwright.verifier.algebra.elements import Dim, Evaluator, spliced
from shardwright.verifier.algebra.shapes import evaluator, solved
from shardwright.verifier.logic import Formula, Number, Solver, z3
from shardwright.verifier.proof import BEYOND, UnprovenError
from shardwright.verifier.reals.numbers import Need, RealNumbers
from shardwright.verifier.reals.reals import Place, Reals, Segments, pieces
from shardwright.verifier.reals.reals_moves import MOVES
from shardwright.verifier.reals.reals_sums import SUMS
from shardwright.verifier.solver import answer, limited, scope

STEPS = 2_000_000


@lru_cache(maxsize=1)
def _solver() -> Solver:
    return limited(z3.SolverFor("QF_UFNRA"), STEPS)


def equal_in_reals(rule: Equation, left: Sequence[Term], right: Sequence[Term]) -> bool:
    """Return whether terms over the rule's variables are equal, where right ones exist wherever the left do.

    The result is False also for unknown.
    """
    try:
        run = evaluator(rule, solved(rule, left))
        ours = [run.tensor(root).dims for root in left]
        run.assuming = False
        theirs = [run.tensor(root).dims for root in right]
        run.use_cuts = True
        if not all(_alike(run, a, b) for a, b in zip(ours, theirs, strict=True)):
            return False
        return all(_equal(run, *pair) for pair in zip(left, right, ours, theirs, strict=True))
    except (ShardwrightError, UnprovenError, z3.Z3Exception, *BEYOND):
        return False


def _alike(run: Evaluator, left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Return whether both sides have the same sizes, digit by digit."""
    return len(left) == len(right) and all(
        len(a) == len(b)
        and all(
            d.splice == e.splice and (bool(d.splice) or run.symbols.equals(d.size, e.size))
            for d, e in zip(a, b, strict=True)
        )
        for a, b in zip(left, right, strict=True)
    )


def _equal(run: Evaluator, left: Term, right: Term, ours: Sequence[Dim], theirs: Sequence[Dim]) -> bool:
    """Return whether two terms have equal elements, in every piece of their dimensions."""
    dims = [run.common("", a, b) if not spliced(a) else a for a, b in zip(ours, theirs, strict=True)]
    return all(_agree(Reals(run, {**MOVES, **SUMS}), left, right, cuts, dims) for cuts in pieces(run, dims))


def _agree(reals: Reals, left: Term, right: Term, cuts: Sequence[Segments], dims: Sequence[Dim]) -> bool:
    index: list[Place] = []
    for at, (dim, cut) in enumerate(zip(dims, cuts, strict=True)):
        place: list[Number] = []
        for digit, (start, size) in zip(range(len(dim)), cut, strict=True):
            name = z3.Int(f"@{at}.{digit}")
            place.append(name if dim[digit].splice else reals.at(name, start, size))
        index.append(tuple(place))
    numbers = reals.numbers
    ours = numbers.flat(reals.element(left, tuple(index)))
    exists, numbers.needs, reals.given = numbers.needs, [], False
    given = [*(argument != 0 for name, argument in exists if name == "inverse"), *numbers.facts]
    theirs = numbers.flat(reals.element(right, tuple(index)))
    if not _exists(numbers, exists, given):
        return False
    return ours.eq(theirs) or _follows(ours == theirs, [*given, *numbers.facts])


def _exists(numbers: RealNumbers, exists: Sequence[Need], given: Sequence[Formula]) -> bool:
    """Return whether the right side's needs follow from the left side's; its own facts count only then."""
    known = [(name, numbers.closed(argument)) for name, argument in exists]
    partial = [
        (name, argument)
        for name, argument in numbers.needs
        if not any(name == other and numbers.closed(argument).eq(seen) for other, seen in known)
    ]
    if any(name != "inverse" or _bound(numbers, argument) for name, argument in partial):
        return False
    return not partial or _follows(z3.And([argument != 0 for _, argument in partial]), given)


def _bound(numbers: RealNumbers, number: Number) -> bool:
    return any(name[0] != "@" for name in numbers.depends(number))


def _follows(goal: Formula, given: Sequence[Formula]) -> bool:
    with scope(_solver()) as solver:
        solver.add(*given, z3.Not(goal))
        return answer(solver) == z3.unsat
