"""The proof of a row rule: forward, and the gradient of every operand, for all sizes and degrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwright.pcg.choice import Choice
from shardwright.pcg.dispatch import Sent
from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.optable import ROWS, keep_attrs
from shardwright.pcg.ring import Ring
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import FactorDims, Pattern
from shardwright.substitutions.rules.rowrules import RowRule, additive, derive
from shardwright.verifier.lemmas import TRUSTED, require
from shardwright.verifier.logic import Formula, z3
from shardwright.verifier.proof import Failure, Proof
from shardwright.verifier.rows import dispatchproof, ringproof
from shardwright.verifier.rows.attributes import attribute_claims
from shardwright.verifier.rows.claims import Claim, Encoding, K, holds_alone, position_claims, sum_claim, tensor_claims
from shardwright.verifier.rows.semantics import BODIES, IndexTerm, terms
from shardwright.verifier.solver import is_valid, premises, refute

INDEX_LEMMAS = ("cancel", "digits", "euclid", "exact", "range")


def prove(rule: RowRule) -> Proof:
    """Prove the rule as it stands. Otherwise the `failure` of the result names the broken claim and the sizes."""
    if rule.choice.moves:
        return _composed(rule)
    pattern, used = rule.shapes(), set[str]()
    try:
        broken = filter(None, (_failed_term(rule, term, used) for term in terms(rule)))
        failure = _ill_formed(rule, pattern) or _unguarded(rule, pattern) or next(broken, None)
        axioms = () if failure else (*map(require, sorted(used & _PROVEN)), *sorted(used - _PROVEN))
    except RuleError as error:
        return Proof(failure=Failure(str(error)))
    return Proof(axioms, failure)


@lru_cache(maxsize=8192)
def proven(rule: RowRule) -> Proof:
    """Return the proof of a row rule, made once, as placement rules rest on the same few row rules."""
    return prove(rule)


class _Beyond(NamedTuple):
    """The check of a kind of composed choices, which yields failures of claims beyond the inner split; its lemmas."""

    broken: Callable[[RowRule, RowRule], Iterator[Failure]]
    lemmas: Sequence[str]


_BEYOND: Mapping[type[Choice], _Beyond] = {
    Sent: _Beyond(dispatchproof.broken, dispatchproof.LEMMAS),
    Ring: _Beyond(ringproof.broken, ringproof.LEMMAS),
}


def _composed(rule: RowRule) -> Proof:
    """Prove the rule of a composed choice: the computation of each device, between two moves."""
    try:
        split = derive(rule.row, rule.shapes(), rule.choice.inner)
    except (GraphError, RuleError) as error:
        return Proof(failure=Failure(str(error)))
    split_proof, beyond = proven(split), _BEYOND[type(rule.choice)]
    failure = split_proof.failure or _unguarded(rule, rule.shapes()) or next(beyond.broken(rule, split), None)
    lemmas = () if failure else (name if name in TRUSTED else require(name) for name in beyond.lemmas)
    return Proof(() if failure else tuple(dict.fromkeys((*split_proof.axioms, *lemmas))), failure)


_PROVEN = {*INDEX_LEMMAS, "split-sum", "linear-sum", "additive-sum"}


def _ill_formed(rule: RowRule, pattern: Pattern) -> Failure | None:
    for dims in pattern.tensors:
        names = [name for dim in dims for name in dim]
        if len(set(names)) < len(names):
            return Failure("a tensor has one factor twice, so that its digits are not free")
    if rule.factor is not None and rule.factor not in pattern.splittable:
        return Failure(f"{rule.factor} is not a splittable factor of {pattern}")
    return None


def _unguarded(rule: RowRule, pattern: Pattern) -> Failure | None:
    """Return the counterexample that a missing guard admits, or None."""
    x, y = z3.Real("x"), z3.Real("y")
    for factor in (factor for factor in rule.choice.factors if f"k | {factor}" not in rule.guard):
        size = z3.Int(f"N_{factor}")
        return refute("not guarded: the degree divides the factor", size % K == 0, [K >= 2, size >= 1], [])
    if rule.factor in pattern.summed and "numeric" not in rule.guard:
        bools = [z3.Or(v == 0, v == 1) for v in (x, y)]
        return refute("not guarded: sums of bools are bools", z3.If(x + y == 0, 0.0, 1.0) == x + y, bools, [])
    if rule.choice.partial and additive(rule.choice.partial) not in rule.guard:
        rounded = [z3.ToReal(z3.ToInt(v)) for v in (x + y, x, y)]
        return refute("not guarded: rounding to integers adds up", rounded[0] == rounded[1] + rounded[2], [], [])
    return None


def _failed_term(rule: RowRule, term: IndexTerm, used: set[str]) -> Failure | None:
    if (failure := _linearity(rule, term, used)) is not None:
        return failure
    if term.title != "forward":
        used.add("chain-rule")
    if rule.factor is not None:
        used.update(INDEX_LEMMAS)
        if rule.factor in term.pattern.summed:
            used.add("split-sum")
    offset = "offset" in rule.local or "shard" in rule.local
    localizes = ROWS[rule.row].localize is not keep_attrs and term.title == "forward"
    return _broken_claim(term, rule.factor, offset, rule.row if localizes else "", "attrs" in rule.local)


@lru_cache(maxsize=65536)
def _broken_claim(
    term: IndexTerm, factor: str | None, offset: bool, localizing: str, localized: bool
) -> Failure | None:
    """Return the first claim that does not hold, or None. Rows with equal patterns and bodies share the answer."""
    encoding, tensors = Encoding(term.pattern, factor), _open(term, factor)
    with premises(encoding.given) as known:
        for title, formula in _claims(term, tensors, encoding, offset, localizing, localized):
            if not known.imply(formula):
                return refute(f"{term.title}: {title}", formula, encoding.given, encoding.sizes)
    return None


_Tensor = tuple[str, FactorDims, Placement]


def _open(term: IndexTerm, factor: str | None) -> list[_Tensor]:
    """Return the tensors whose claims do not hold alone."""
    titles = (*(f"operand {number}" for number in range(len(term.operands))), "the result")
    tensors = zip(titles, term.pattern.tensors, (*term.operands, term.result), strict=True)
    return [(title, dims, placement) for title, dims, placement in tensors if not holds_alone(dims, placement, factor)]


def _claims(
    term: IndexTerm, tensors: list[_Tensor], encoding: Encoding, offset: bool, localizing: str, localized: bool
) -> Iterator[Claim]:
    if localizing:
        yield from attribute_claims(localizing, encoding, localized)
    for title, dims, placement in tensors:
        yield from tensor_claims(encoding, title, dims, placement)
    yield sum_claim(encoding, term)
    yield from position_claims(encoding, term, offset)


def _linearity(rule: RowRule, term: IndexTerm, used: set[str]) -> Failure | None:
    """Return a failure unless the body is jointly linear in exactly the partial operands."""
    partial = frozenset(i for i, p in enumerate(term.operands) if p.kind == "P") - term.body.ignores
    if not partial:
        return None
    title = f"{term.title}: linear in the partial operands {sorted(partial)}"
    if term.title == "forward" and rule.row in BODIES:
        formula, given = _additivity(rule.row, len(term.operands), partial)
        if not is_valid(formula, given):
            return refute(title, formula, given, [])
        used.update(("additive-sum", "linear-sum"))
    elif partial not in term.body.linear:
        return Failure(f"{title}, which the row does not declare")
    elif term.title == "forward":
        used.update(("additive-sum", "linear-sum", f"declared: {rule.row} is linear in {sorted(partial)}"))
    else:
        used.update(("additive-sum", "linear-sum", "adjoint-of-linear"))
    return None


def _additivity(row: str, num_operands: int, partial: frozenset[int]) -> tuple[Formula, list[Formula]]:
    """Return body(x + y) = body(x) + body(y) and body(0) = 0, where x and y differ in the partial operands alone."""
    common = [z3.Real(f"x{i}") for i in range(num_operands)]
    x = [z3.Real(f"a{i}") if i in partial else v for i, v in enumerate(common)]
    y = [z3.Real(f"b{i}") if i in partial else v for i, v in enumerate(common)]
    both = [a + b if i in partial else a for i, (a, b) in enumerate(zip(x, y, strict=True))]
    zero = [z3.RealVal(0) if i in partial else v for i, v in enumerate(common)]
    body = BODIES[row]
    given = [v != 0 for v in common] if row == "div" else []
    return z3.And(body(both) == body(x) + body(y), body(zero) == 0), given
