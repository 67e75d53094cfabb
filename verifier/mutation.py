"""The mutation test of the prover: from certified rules, systematically wrong ones; what becomes of each.

    type             refuted: ill-typed, or not defined where the rule is
    z3               refuted by numbers for which a claim breaks
    counterexample   refuted by the falsifier, on concrete tensors
    true             certified, and the falsifier cannot tell it from the truth: a true variant of the rule
    unknown          neither proven nor refuted; never used
    wrong            certified, but the falsifier has a counterexample: the prover is broken

The falsifiers share nothing with the proofs but the rule (`falsify`, `falsify_serial`, the generator's `devices`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from shardwright.pcg.errors import RuleError, ShardwrightError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rowrules import RowRule
from shardwright.substitutions.rules import Rule
from shardwright.verifier.certificates import prove
from shardwright.verifier.falsify import falsify_row
from shardwright.verifier.falsify_serial import falsify_equation, falsify_steps
from shardwright.verifier.solver import Failure
from shardwright.verifier.twins import fixed_twins, row_twins, step_twins, term_twins

Outcome = Literal["type", "z3", "counterexample", "true", "unknown", "wrong"]
OUTCOMES: tuple[Outcome, ...] = ("type", "z3", "counterexample", "true", "unknown", "wrong")


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


def form_of(rule: Rule) -> str:
    """row, steps, equation or placement."""
    if isinstance(rule, Equation):
        return "placement" if rule.axes else "equation"
    return "row" if isinstance(rule, RowRule) else "steps"


def mutants(rules: Iterable[Rule]) -> Iterator[Mutant]:
    """Every mutant of these rules once; none is one of the rules."""
    rules = list(rules)
    seen = {rule.hash for rule in rules}
    for rule in rules:
        for what, twin in _twins(rule):
            if twin.hash not in seen:
                seen.add(twin.hash)
                yield Mutant(form_of(rule), rule.name, what, twin)


def _twins(rule: Rule) -> Iterator[tuple[str, Rule]]:
    if isinstance(rule, RowRule):
        yield from row_twins(rule)
        if rule.choice == "R":  # once per pattern
            yield from fixed_twins(rule.row, rule.shapes())
    elif isinstance(rule, Equation):
        yield from term_twins(rule)
    else:
        yield from step_twins(rule)


def judged(mutant: Mutant) -> Mutant:
    """The mutant with its outcome."""
    outcome, reason = judgement(mutant.rule)
    return Mutant(mutant.form, mutant.name, mutant.what, mutant.rule, outcome, reason)


def judgement(rule: Rule) -> tuple[Outcome, str]:
    """What becomes of a rule that may be false, and why."""
    failure = _failure(rule)
    if failure is not None and failure.refuted:
        return ("type" if failure.ill_typed else "z3"), str(failure)
    outcome, found = falsified(rule)
    if failure is None:
        return ("wrong", found) if outcome else ("true", "")
    return (outcome, found) if outcome else ("unknown", str(failure))


def _failure(rule: Rule) -> Failure | None:
    try:
        return prove(rule)[1]
    except ShardwrightError as error:
        return Failure(str(error))


def falsified(rule: Rule) -> tuple[Outcome | None, str]:
    """How the falsifier refutes the rule, if it does; not at all where it cannot run it."""
    try:
        found = _counterexample(rule)
    except RuleError:  # no small sizes satisfy the left side and the guard
        return None, ""
    if not found:
        return None, ""
    undefined = any(sign in found for sign in _UNDEFINED)
    return ("type" if undefined else "counterexample"), found


def _counterexample(rule: Rule) -> str:
    if isinstance(rule, RowRule):
        found = falsify_row(rule)
    elif not isinstance(rule, Equation):
        found = falsify_steps(rule)
    elif rule.axes:
        from shardwright.substitutions.generator.devices import recheck

        return next(iter(recheck([rule]).values()), "")
    else:
        found = falsify_equation(rule, trials=12)
    return str(found or "")


# ---- a whole sweep ----


@dataclass
class Sweep:
    """Counts by form and outcome, and the mutants that need explaining."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[Mutant] = field(default_factory=list)
    unknown: list[Mutant] = field(default_factory=list)
    true: list[Mutant] = field(default_factory=list)

    def add(self, mutant: Mutant) -> None:
        """Count a judged mutant."""
        self.counts.setdefault(mutant.form, Counter())[mutant.outcome] += 1
        kept: Mapping[str, list[Mutant]] = {"wrong": self.wrong, "unknown": self.unknown, "true": self.true}
        if mutant.outcome in kept:
            kept[mutant.outcome].append(mutant)

    def merge(self, other: Sweep) -> None:
        """Add what another sweep counted."""
        for form, counts in other.counts.items():
            self.counts.setdefault(form, Counter()).update(counts)
        self.wrong += other.wrong
        self.unknown += other.unknown
        self.true += other.true

    @property
    def num_mutants(self) -> int:
        return sum(sum(counts.values()) for counts in self.counts.values())

    def total(self, outcome: Outcome) -> int:
        """How many mutants of all forms came to this."""
        return sum(counts[outcome] for counts in self.counts.values())


def sweep(rules: Iterable[Rule], start: int = 0, step: int = 1) -> Sweep:
    """Judge every `step`-th mutant from number `start`."""
    found = Sweep()
    for mutant in islice(mutants(rules), start, None, step):
        found.add(judged(mutant))
    return found
