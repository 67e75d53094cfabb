"""The judgement of one rule: certified, refuted with a counterexample, or unknown with the reason.

Whatever a rule looks like, judging it ends: with a verdict, within a time limit, without an exception.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rowrules import RowRule
from shardwright.substitutions.rules import Rule
from shardwright.verifier.catalogue import SHIPPED, read_head
from shardwright.verifier.certificates import Certificate, prove, rule_guard
from shardwright.verifier.limits import Late, limit

LIMIT_S = 20.0
"""Seconds for one rule; what takes longer is unknown."""
_HINT_S = 3.0
Outcome = Literal["certified", "refuted", "unknown", "malformed"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a rule.

    reason    what broke, where it is not certified: a counterexample as small tensors where one was found
    hint      a guard under which a refuted rule is true, if one was found
    second    the second proof that the rule has: "den" (`denotation`) or "reals" (`realproof`)
    """

    outcome: Outcome
    certificate: Certificate | None = None
    reason: str = ""
    hint: str = ""
    time_s: float = 0.0
    second: str = ""


def judge(rule: Rule, limit_s: float = LIMIT_S, *, explain: bool = True) -> Verdict:
    """Prove the rule, or find out what is wrong with it.

    Without `explain`, no guard is looked for that mends it, and no second proof.
    """
    start = time.perf_counter()
    if isinstance(rule, RowRule) and not _occurs(rule):
        return Verdict("unknown", None, f"no {rule.row} is known to have the pattern {rule.pattern!r}")
    found = _prove(rule, limit_s)
    if found.outcome == "certified" and isinstance(rule, Equation) and rule.moves:
        found = _exact(rule, found, limit_s)
    elif found.outcome in ("refuted", "unknown"):
        counterexample = _counterexample(rule, limit_s)
        if counterexample is not None:
            found = Verdict("refuted", None, counterexample)
        hint = _weakest_guard(rule, limit_s) if explain and found.outcome == "refuted" else ""
        found = Verdict(found.outcome, None, found.reason, hint)
    second = _second_proof(rule, limit_s) if explain and found.outcome == "certified" else ""
    return replace(found, time_s=time.perf_counter() - start, second=second)


def _second_proof(rule: Rule, limit_s: float) -> str:
    """The other proof, if it is found."""
    if not isinstance(rule, Equation):
        return ""
    from shardwright.verifier.placement.denotation import denotes_equal
    from shardwright.verifier.reals.realproof import equal_in_reals

    try:
        with limit(limit_s):
            if rule.axes:
                return "den" if denotes_equal(rule) else ""
            return "reals" if equal_in_reals(rule) else ""
    except Exception:  # noqa: BLE001 - no second proof, and no more
        return ""


def _occurs(rule: RowRule) -> bool:
    """Whether the pattern is one of the row's: checked by shape when the rule is read, or seen by the shipped rules."""
    return isinstance(ROWS[rule.row].factors, str) or (rule.row, rule.pattern) in _seen()


@lru_cache(maxsize=1)
def _seen() -> frozenset[tuple[str, str]]:
    """The patterns of the shipped row rules, which were collected from operators of models, whoever proved them."""
    entries = read_head(SHIPPED)["rules"] if SHIPPED.exists() else []
    return frozenset((e["row"], e["pattern"]) for e in entries if e["form"] == "row")


def _prove(rule: Rule, limit_s: float) -> Verdict:
    from shardwright.verifier.solver import version

    try:
        with limit(limit_s):
            axioms, failure = prove(rule)
    except Late:
        return Verdict("unknown", None, f"no proof within {limit_s:g} s")
    except Exception as error:  # noqa: BLE001 - a rule that the prover stumbles over is not proven
        return Verdict("unknown", None, f"the prover failed: {type(error).__name__}: {error}")
    if failure is None:
        return Verdict("certified", Certificate(rule.hash, rule.name, axioms, rule_guard(rule), version()))
    if failure.malformed:
        return Verdict("malformed", None, str(failure))
    return Verdict("refuted" if failure.refuted else "unknown", None, str(failure))


def _exact(rule: Equation, found: Verdict, limit_s: float) -> Verdict:
    """A rule that is true over the reals, but not bit for bit as its field `moves` says, is refuted."""
    from shardwright.verifier.falsifiers.exactness import inexact, reduces

    if reduces(rule):
        return Verdict("refuted", None, "field 'moves': reduce adds up what the devices hold")
    serial = rule.erased if rule.axes else rule
    if serial is None:  # one serial term on both sides
        return found
    try:
        with limit(limit_s):
            differs = inexact(serial)
    except Exception:  # noqa: BLE001 - no instance that runs on real numbers: nothing is known against it
        return found
    return found if differs is None else Verdict("refuted", None, f"field 'moves': not bit for bit: {differs}")


def _counterexample(rule: Rule, limit_s: float) -> str | None:
    """Small tensors for which the rule is false, as text, if the falsifiers find any."""
    try:
        with limit(limit_s):
            return _falsify(rule)
    except Late:
        return None
    except ShardwrightError:  # no sizes that fit, or operators that the falsifier cannot run
        return None
    except Exception:  # noqa: BLE001 - the same, said by NumPy
        return None


def _falsify(rule: Rule) -> str | None:
    if isinstance(rule, RowRule):
        from shardwright.verifier.falsifiers.falsify import falsify_row

        found = falsify_row(rule)
    elif isinstance(rule, Equation):
        from shardwright.verifier.falsifiers.falsify_serial import falsify_equation

        found = falsify_equation(rule)
    else:
        from shardwright.verifier.falsifiers.falsify_steps import falsify_steps

        found = falsify_steps(rule)
    return None if found is None else str(found)


def _weakest_guard(rule: Rule, limit_s: float) -> str:
    """Conditions under which an equation is true after all, as text; "" where none are found."""
    if not isinstance(rule, Equation):
        return ""
    from shardwright.verifier.guards import weakest_guard

    try:
        with limit(min(limit_s, _HINT_S)):
            return ", ".join(map(str, weakest_guard(rule) or ()))
    except Late:
        return ""
    except Exception:  # noqa: BLE001 - a hint, and no more
        return ""
