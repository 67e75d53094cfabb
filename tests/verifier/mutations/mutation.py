"""The mutation test of the prover: from certified rules, systematically wrong ones; what becomes of each.

    type             refuted: ill-typed, or not defined where the rule is
    z3               refuted by numbers for which a claim breaks
    counterexample   refuted by the falsifier, on concrete tensors
    true             certified, and the falsifier cannot tell it from the truth: a true variant of the rule
    not run          certified, and the falsifier has no operands to run it on, or does not end in time
    unknown          neither proven nor refuted; never used
    wrong            certified, but the falsifier has a counterexample: the prover is broken

The falsifiers share nothing with the proofs but the rule (`falsify`, `falsify_serial`, `devices`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from shardwright.pcg.errors import LayoutError, RuleError, ShardwrightError
from shardwright.pcg.layout import P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import ADJOINT, COMBINE, PARALLEL_OPS, PARTITION, REDUCE, REPLICATE, step
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.rowrules import RowRule
from shardwright.substitutions.rules.rules import Rule, kind_of
from shardwright.substitutions.rules.steps import StepRule
from shardwright.verifier.certificates import prove
from shardwright.verifier.falsifiers.falsify import admitted, falsify, falsify_row
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from shardwright.verifier.falsifiers.falsify_steps import falsify_steps
from shardwright.verifier.limits import Late, limit
from shardwright.verifier.proof import Failure
from tests.verifier.mutations.twins import fixed_twins, row_twins, step_twins, term_twins

Outcome = Literal["type", "z3", "counterexample", "true", "not run", "unknown", "wrong"]
LIMIT_S = 20.0
"""Seconds for a proof, and for a counterexample."""
OUTCOMES: tuple[Outcome, ...] = ("type", "z3", "counterexample", "true", "not run", "unknown", "wrong")


Samples = Callable[[RowRule], Iterable[tuple[Sequence[Any], Mapping[str, Any]]]]
"""Operands and attributes that have a row rule's pattern and satisfy its guard on dtypes."""
_DEGREES = (2, 4)
_UNDEFINED = ("not defined", "the left is", "has no split", "steps from", "a type other")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed rule: what it was made from, what was done to it, what became of it and why."""

    form: str
    name: str
    what: str
    rule: Rule
    outcome: Outcome = "unknown"
    reason: str = ""


def no_samples(rule: RowRule) -> Iterable[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Row rules are then run on operands made up from their patterns alone, where these decide everything."""
    return ()


def mutants(rules: Iterable[Rule]) -> Iterator[Mutant]:
    """Every mutant of these rules once; none is one of the rules, nor says that a term equals itself."""
    rules = list(rules)
    seen = {rule.hash for rule in rules}
    for rule in rules:
        for what, twin in _twins(rule):
            if twin.hash not in seen and not (isinstance(twin, Equation) and twin.left == twin.right):
                seen.add(twin.hash)
                yield Mutant(kind_of(rule), rule.name, what, twin)


def _twins(rule: Rule) -> Iterator[tuple[str, Rule]]:
    if isinstance(rule, RowRule):
        yield from row_twins(rule)
        if rule.choice == "R":  # once per pattern
            yield from fixed_twins(rule.row, rule.shapes())
    elif isinstance(rule, Equation):
        yield from term_twins(rule)
    else:
        yield from step_twins(rule)


def judged(mutant: Mutant, samples: Samples = no_samples) -> Mutant:
    """The mutant with its outcome."""
    outcome, reason = judgement(mutant.rule, samples)
    return Mutant(mutant.form, mutant.name, mutant.what, mutant.rule, outcome, reason)


def judgement(rule: Rule, samples: Samples = no_samples) -> tuple[Outcome, str]:
    """What becomes of a rule that may be false, and why."""
    failure = _failure(rule)
    if failure is not None and failure.refuted:
        return ("type" if failure.ill_typed or failure.malformed else "z3"), str(failure)
    outcome, found = falsified(rule, samples)
    if failure is not None:
        return (outcome, found) if outcome in ("type", "counterexample") else ("unknown", str(failure))
    if outcome == "true" and isinstance(rule, Equation) and rule.axes:
        try:
            with limit(LIMIT_S):
                found = _wrong_gradient(rule)
        except Late:
            outcome, found = "not run", f"gradients not compared within {LIMIT_S:g} s"
    if outcome == "not run":
        return outcome, found
    return ("wrong", found) if found else ("true", "")


def _failure(rule: Rule) -> Failure | None:
    try:
        with limit(LIMIT_S):
            return prove(rule).failure
    except ShardwrightError as error:
        return Failure(str(error))
    except Late:
        return Failure(f"no proof within {LIMIT_S:g} s")


def falsified(rule: Rule, samples: Samples = no_samples) -> tuple[Outcome, str]:
    """How the falsifier refutes the rule; "true" where it does not, "not run" where it cannot run it."""
    try:
        with limit(LIMIT_S):
            found = _counterexample(rule, samples)
    except (RuleError, IndexError) as error:  # no small sizes satisfy the left side and the guard
        return "not run", str(error)
    except Late:
        return "not run", f"not falsified within {LIMIT_S:g} s"
    if not found:
        return "true", ""
    undefined = any(sign in found for sign in _UNDEFINED)
    return ("type" if undefined else "counterexample"), found


def _counterexample(rule: Rule, samples: Samples) -> str:
    if isinstance(rule, RowRule):
        return _of_row(rule, samples)
    if not isinstance(rule, Equation):
        return str(falsify_steps(rule) or "")
    if rule.axes:
        from tests.verifier.rechecking import recheck

        return next(iter(recheck([rule]).values()), "")
    return str(falsify_equation(rule, trials=12) or "")


def _of_row(rule: RowRule, samples: Samples) -> str:
    """On operands made up from the pattern, then on samples; `RuleError` where there are neither."""
    found, ran = falsify_row(rule), isinstance(ROWS[rule.row].factors, str)
    for arrays, attrs in samples(rule) if found is None else ():
        for degree in _DEGREES:
            if admitted(rule, arrays, attrs, degree):
                found, ran = found or falsify(rule, arrays, attrs, degree), True
    if not ran:
        raise RuleError(f"no operands of the pattern {rule.pattern!r} that {rule.choice} can split are at hand")
    return str(found or "")


def _wrong_gradient(rule: Equation) -> str:
    """How a gradient of a certified placement rule is wrong on two devices of each axis, if it is."""
    from tests.verifier.gradients import gradient_difference

    return gradient_difference(rule, Mesh(rule.axes, (2,) * len(rule.axes))) or ""


# ---- a whole sweep ----


@dataclass
class Sweep:
    """Counts by form and outcome, and the mutants that need explaining."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[Mutant] = field(default_factory=list)
    unknown: list[Mutant] = field(default_factory=list)
    not_run: list[Mutant] = field(default_factory=list)
    true: list[Mutant] = field(default_factory=list)

    def add(self, mutant: Mutant) -> None:
        """Count a judged mutant."""
        self.counts.setdefault(mutant.form, Counter())[mutant.outcome] += 1
        kept = {"wrong": self.wrong, "unknown": self.unknown, "not run": self.not_run, "true": self.true}
        if mutant.outcome in kept:
            kept[mutant.outcome].append(mutant)

    def merge(self, other: Sweep) -> None:
        """Add what another sweep counted."""
        for form, counts in other.counts.items():
            self.counts.setdefault(form, Counter()).update(counts)
        self.wrong += other.wrong
        self.unknown += other.unknown
        self.not_run += other.not_run
        self.true += other.true

    @property
    def num_mutants(self) -> int:
        return sum(sum(counts.values()) for counts in self.counts.values())

    def total(self, outcome: Outcome) -> int:
        """How many mutants of all forms came to this."""
        return sum(counts[outcome] for counts in self.counts.values())


def sweep(rules: Iterable[Rule], start: int = 0, every: int = 1, samples: Samples = no_samples) -> Sweep:
    """Judge every `every`-th mutant from number `start`."""
    found = Sweep()
    for mutant in islice(mutants(rules), start, None, every):
        found.add(judged(mutant, samples))
    return found


# ---- the adjoints of the parallel operators ----


def adjoint_mutants() -> Iterator[Mutant]:
    """Every other operator in place of a parallel operator's adjoint, judged by the types of the gradient."""
    starts = {PARTITION: R, COMBINE: S(0), REPLICATE: R, REDUCE: P}
    for op, before in starts.items():
        move = step(op, 0, before, dim=0)
        rule = StepRule(op, (), (), ())
        for wrong in PARALLEL_OPS:
            if wrong == ADJOINT[op]:
                continue
            try:
                back = step(wrong, 0, move.after.dual, dim=0)
                typed = back.after == move.before.dual
                reason = "" if typed else f"{back.after} is not the gradient's layout, {move.before.dual}"
            except LayoutError as error:
                typed, reason = False, str(error)
            yield Mutant("adjoint", op, f"{ADJOINT[op]} → {wrong}", rule, "wrong" if typed else "type", reason)
