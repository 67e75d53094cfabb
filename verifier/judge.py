"""The judgement of one rule: certified, refuted with a counterexample, or unknown with the reason.

The judgement of any rule ends with a verdict, within a time limit and without an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from shardwright.pcg.optable import ROWS
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.rowrules import RowRule
from shardwright.substitutions.rules.rules import Rule
from shardwright.substitutions.rules.steps import StepRule
from shardwright.verifier.catalogue import SHIPPED, read_head
from shardwright.verifier.certificates import Certificate, RuleVerdict, prove
from shardwright.verifier.falsifiers.exactness import inexact, reduces
from shardwright.verifier.falsifiers.falsify import falsify_row
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from shardwright.verifier.falsifiers.falsify_steps import falsify_steps
from shardwright.verifier.limits import Late, limit

T = TypeVar("T")
LIMIT_S = 20.0
"""The time limit for one rule, in seconds of this process's work; a rule that takes longer is unknown."""
_HINT_S = 3.0
Jury = Callable[[Sequence[Rule]], Iterator[tuple[Rule, RuleVerdict]]]
"""A function that judges many rules, in any order."""


def one_by_one(rules: Sequence[Rule]) -> Iterator[tuple[Rule, RuleVerdict]]:
    """Judge rules one by one, in this process."""
    for rule in rules:
        yield rule, judge(rule, explain=False)


def judge(rule: Rule, limit_s: float = LIMIT_S, *, explain: bool = True) -> RuleVerdict:
    """Prove a rule, or find what is wrong with it. With `explain`, also search for a guard under which it is true."""
    start = time.perf_counter()
    if isinstance(rule, RowRule) and not _occurs(rule):
        return RuleVerdict("unknown", None, f"no {rule.row} is known to have the pattern {rule.pattern!r}")
    verdict = _prove(rule, limit_s)
    if verdict.outcome == "certified" and isinstance(rule, Equation) and rule.moves:
        verdict = _exact(rule, verdict, limit_s)
    elif verdict.outcome in ("refuted", "unknown"):
        counterexample = _within(limit_s, lambda: _counterexample(rule))
        if counterexample:
            verdict = RuleVerdict("refuted", None, counterexample)
        if explain and verdict.outcome == "refuted":
            verdict = replace(verdict, hint=_within(min(limit_s, _HINT_S), lambda: _weakest_guard(rule)) or "")
    return replace(verdict, time_s=time.perf_counter() - start)


def _within(limit_s: float, answer: Callable[[], T]) -> T | None:
    """Return the answer, or None if it takes too long or the rule cannot be run (any error of ours or NumPy's)."""
    try:
        with limit(limit_s):
            return answer()
    except Exception:  # noqa: BLE001 - `Late` is one
        return None


def _occurs(rule: RowRule) -> bool:
    """Return whether the row has this pattern: checked by shape when the rule is read, or seen in the shipped rules."""
    return isinstance(ROWS[rule.row].factors, str) or (rule.row, rule.pattern) in _seen()


@lru_cache(maxsize=1)
def _seen() -> frozenset[tuple[str, str]]:
    """Return the patterns of the shipped row rules, which were collected from operators of models."""
    entries = read_head(SHIPPED)["rules"] if SHIPPED.exists() else []
    return frozenset((e["row"], e["pattern"]) for e in entries if e["form"] == "row")


def _prove(rule: Rule, limit_s: float) -> RuleVerdict:
    try:
        with limit(limit_s):
            axioms, failure = prove(rule)
    except Late:
        return RuleVerdict("unknown", None, f"no proof within {limit_s:g} s", final=False)
    except Exception as error:  # noqa: BLE001 - a rule on which the prover fails is not proven
        return RuleVerdict("unknown", None, f"the prover failed: {type(error).__name__}: {error}", final=False)
    if failure is None:
        return RuleVerdict("certified", Certificate.of(rule, axioms))
    if failure.malformed:
        return RuleVerdict("malformed", None, str(failure))
    return RuleVerdict("refuted" if failure.refuted else "unknown", None, str(failure))


def _exact(rule: Equation, verdict: RuleVerdict, limit_s: float) -> RuleVerdict:
    """Refute a rule that is true over the reals, but not bit for bit as its field `moves` claims."""
    if reduces(rule):
        return RuleVerdict("refuted", None, "field 'moves': reduce adds up what the devices hold")
    serial = rule.erased if rule.axes else rule
    if serial is None:  # one serial term on both sides
        return verdict
    differs = _within(limit_s, lambda: inexact(serial))
    return verdict if differs is None else RuleVerdict("refuted", None, f"field 'moves': not bit for bit: {differs}")


def _counterexample(rule: Rule) -> str:
    """Return small tensors for which the rule is false, as text; "" if the falsifiers find none."""
    match rule:
        case RowRule():
            counterexample = falsify_row(rule)
        case Equation():
            counterexample = falsify_equation(rule)
        case StepRule():
            counterexample = falsify_steps(rule)
    return str(counterexample or "")


def _weakest_guard(rule: Rule) -> str:
    """Return conditions under which an equation is true, as text; "" if none are found."""
    if not isinstance(rule, Equation):
        return ""
    from shardwright.verifier.guards import weakest_guard

    return ", ".join(map(str, weakest_guard(rule) or ()))
