"""Certificates: the proven rules, their axioms and their provers. The search trusts only these.

Equations have two proofs that share no algebra (docs/proofs.md). A certificate needs both: a rule that only one of them
proves is unknown. `store` keeps certificates by the hash of their rule; a file of rules cannot claim one.
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
"""The proofs of every kind of rule. A certificate needs all of them, and its axioms are those of the first."""
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
        """Return the certificate of a rule that this prover has just proven."""
        from shardwright.verifier.solver import version

        return cls(rule.hash, rule.name, axioms, rule_guard(rule), version(), PROOFS[kind_of(rule)])

    @classmethod
    def of_json(
        cls, key: str, data: Mapping[str, Any], axioms: tuple[str, ...], guard: tuple[str, ...], solver: str
    ) -> Certificate:
        """Return the certificate of a rule that was proven before, from its hash and its JSON form."""
        return cls(key, json_name(data), axioms, guard, solver, PROOFS[json_kind(data)])


Outcome = Literal["certified", "refuted", "unknown", "malformed"]


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """The verdict on a rule.

    reason    the reason why it is not certified: a counterexample as small tensors if one was found
    hint      a guard under which a refuted rule is true, if one was found
    final     True if the same prover would give the same verdict; False if time or the process ended first
    """

    outcome: Outcome
    certificate: Certificate | None = None
    reason: str = ""
    hint: str = ""
    time_s: float = 0.0
    final: bool = True


_PROVER = ("rows", "algebra", "reals", "placement", "falsifiers", "certificates.py", "fit.py", "judge.py", "lemmas.py",
           "limits.py", "logic.py", "proof.py", "solver.py")  # fmt: skip
_TYPES = ("choice", "dispatch", "factors", "inference", "layout", "moves", "offers", "parallel", "ring")
_FORMS = ("equations", "expressions", "fields", "placement", "terms", "rules/attributes", "rules/pattern",
          "rules/primes", "rules/rowrules", "rules/rules", "rules/steps", "rules/wellformed")  # fmt: skip


@lru_cache(maxsize=1)
def prover_digest() -> str:
    """Return a hash of the prover: its source, the form of the rules, and each row's facts on which proofs depend."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    sources = [root / "verifier" / name for name in _PROVER]
    sources += [root / "substitutions" / f"{name}.py" for name in _FORMS]
    sources += [root / "pcg" / f"{name}.py" for name in _TYPES]
    for source in sources:
        for file in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    for row in ROWS.values():
        facts = (row.name, row.offset, row.random, row.linear_in, row.differentiable, row.moves, row.indexes, row.free,
                 row.sends, row.travels, row.offset_at, row.spaced)  # fmt: skip
        source = "" if row.localize is keep_attrs else inspect.getsource(row.localize)
        factors = row.factors if isinstance(row.factors, str) else inspect.getsource(row.factors)
        digest.update(repr((facts, source, factors)).encode())
    return digest.hexdigest()[:16]


def certify(rule: Rule) -> Certificate | str:
    """Prove a rule now; return its certificate, or the reason why there is none.

    If attributes take part in a row's factors (`softmax`, `reshape`), the pattern of a row rule is taken as given: the
    certificate is about operators with this pattern, if there are any. The search derives patterns from operators, and
    `judge` calls a rule unknown if its pattern was not seen in an operator.
    """
    try:
        proof = prove(rule)
    except Late:
        return "no proof in time"
    return str(proof.failure) if proof.failure else Certificate.of(rule, proof.axioms)


def prove(rule: Rule) -> Proof:
    """Return the first proof, or the failure of it or of the second proof. Z3 is only loaded here."""
    from shardwright.verifier.fit import checked

    proof = _first_proof(rule)
    failure = checked(rule, proof.failure)
    if failure is None and isinstance(rule, Equation):
        failure = _unconfirmed(rule)
    return Proof(failure=failure) if failure else proof


def _unconfirmed(rule: Equation) -> Failure | None:
    """Return the failure of an equation that the second proof does not confirm, or None."""
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
    """Return the conditions of a rule as text."""
    return tuple(map(str, rule.guard))
