"""Certificates: which rules are proven, from what, and with what. The search asks here and nowhere else.

Equations have two proofs that share no algebra (docs/proofs.md). A certificate takes both: what only one of them proves
is unknown. `store` keeps certificates by the hash of their rule; a file of rules cannot claim one.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from shardwright.pcg.optable import ROWS, keep_attrs
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.rowrules import RowRule
from shardwright.substitutions.rules.rules import Rule, json_kind, json_name, kind_of
from shardwright.verifier.limits import Late
from shardwright.verifier.proof import Failure, Proof

PROOFS: Mapping[str, tuple[str, ...]] = {
    "row": ("index semantics",),
    "steps": ("simulation of devices",),
    "serial": ("normal forms", "real arithmetic"),
    "placement": ("typing and erasure", "typed denotation"),
}
"""The proofs that there are of every kind of rule, the first one being that of the axioms. A certificate needs all."""
SCOPE = "over the reals; all sizes that satisfy the guard; every degree k ≥ 1; forward and all gradients"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A proven rule. `rule` is its hash, `axioms` the lemmas and declared facts that the first of its `proofs` uses."""

    rule: str
    name: str
    axioms: tuple[str, ...]
    guard: tuple[str, ...]
    solver: str
    proofs: tuple[str, ...]
    scope: str = SCOPE

    @classmethod
    def of(cls, rule: Rule, axioms: tuple[str, ...]) -> Certificate:
        """The certificate of a rule that this prover proved just now."""
        from shardwright.verifier.solver import version

        return cls(rule.hash, rule.name, axioms, rule_guard(rule), version(), PROOFS[kind_of(rule)])

    @classmethod
    def of_json(
        cls, key: str, data: Mapping[str, Any], axioms: tuple[str, ...], guard: tuple[str, ...], solver: str
    ) -> Certificate:
        """The certificate of a rule that was proven before, from its hash and its JSON form."""
        return cls(key, json_name(data), axioms, guard, solver, PROOFS[json_kind(data)])


Outcome = Literal["certified", "refuted", "unknown", "malformed"]


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """What became of a rule.

    reason    what broke, where it is not certified: a counterexample as small tensors where one was found
    hint      a guard under which a refuted rule is true, if one was found
    final     whether the same prover says the same again: not where time or the process ended first
    """

    outcome: Outcome
    certificate: Certificate | None = None
    reason: str = ""
    hint: str = ""
    time_s: float = 0.0
    final: bool = True


_PROVER = ("rows", "algebra", "reals", "placement", "falsifiers", "certificates.py", "fit.py", "judge.py", "lemmas.py",
           "limits.py", "logic.py", "proof.py", "solver.py")  # fmt: skip
_TYPES = ("choice", "dispatch", "factors", "inference", "layout", "moves", "offers", "parallel")
_FORMS = ("equations", "expressions", "fields", "placement", "terms", "rules/attributes", "rules/pattern",
          "rules/primes", "rules/rowrules", "rules/rules", "rules/steps", "rules/wellformed")  # fmt: skip


@lru_cache(maxsize=1)
def prover_digest() -> str:
    """Names the prover: its source, the form of the rules, and of every row what proofs depend on."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    sources = [root / "verifier" / name for name in _PROVER]
    sources += [root / "substitutions" / f"{name}.py" for name in _FORMS]
    sources += [root / "pcg" / f"{name}.py" for name in _TYPES]
    for source in sources:
        for file in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    for row in ROWS.values():
        facts = (row.name, row.offset, row.random, row.linear_in, row.differentiable, row.moves, row.indexes, row.free,
                 row.sends, row.offset_at)  # fmt: skip
        source = "" if row.localize is keep_attrs else inspect.getsource(row.localize)
        factors = row.factors if isinstance(row.factors, str) else inspect.getsource(row.factors)
        digest.update(repr((facts, source, factors)).encode())
    return digest.hexdigest()[:16]


def certify(rule: Rule) -> Certificate | str:
    """Prove a rule now: its certificate, or why there is none.

    A row rule's pattern is taken as given where attributes have a part in the row's factors (`softmax`, `reshape`): the
    certificate is about operators of that pattern, if there are any. The search derives patterns from operators, and
    `judge` calls those unknown that were not seen in one.
    """
    try:
        proof = prove(rule)
    except Late:
        return "no proof in time"
    return str(proof.failure) if proof.failure else Certificate.of(rule, proof.axioms)


def prove(rule: Rule) -> Proof:
    """The first proof, or what broke, in it or in the second one. Z3 is only loaded here."""
    from shardwright.verifier.fit import checked

    proof = _first_proof(rule)
    failure = checked(rule, proof.failure)
    if failure is None and isinstance(rule, Equation):
        failure = _unconfirmed(rule)
    return Proof(failure=failure) if failure else proof


def _unconfirmed(rule: Equation) -> Failure | None:
    """What is said of an equation that its first proof proves, and its second one does not."""
    from shardwright.verifier.placement.denotation import denotes_equal
    from shardwright.verifier.reals.realproof import equal_in_reals

    if denotes_equal(rule) if rule.axes else equal_in_reals(rule, rule.left, rule.right):
        return None
    one, other = PROOFS[kind_of(rule)]
    return Failure(f"proven by {one}, by {other}")


def _first_proof(rule: Rule) -> Proof:
    from shardwright.verifier.algebra.serialproof import prove_terms
    from shardwright.verifier.placement.typing import prove_placement
    from shardwright.verifier.rows.rowproof import proven
    from shardwright.verifier.rows.stepproof import prove_steps

    if isinstance(rule, RowRule):
        return proven(rule)
    if isinstance(rule, Equation):
        return prove_placement(rule) if rule.axes else prove_terms(rule, rule.left, rule.right)
    return Proof(("digits", "linear-sum"), prove_steps(rule))


def rule_guard(rule: Rule) -> tuple[str, ...]:
    """The conditions of a rule as text."""
    return tuple(map(str, rule.guard))
