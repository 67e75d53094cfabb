"""Certificates: which rules are proven, from what, and with what. The search asks here and nowhere else.

Certificates are kept in a `Catalogue`, in memory and in files.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.pcg.optable import ROWS, keep_attrs
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rowrules import RowRule
from shardwright.substitutions.rules import Rule

if TYPE_CHECKING:
    from shardwright.verifier.solver import Failure

SCOPE = "over the reals; all sizes that satisfy the guard; every degree k ≥ 1; forward and all gradients"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A proven rule. `rule` is its hash, `axioms` the lemmas and declared facts that the proof uses."""

    rule: str
    name: str
    axioms: tuple[str, ...]
    guard: tuple[str, ...]
    solver: str
    scope: str = SCOPE


_PROVER = ("rows", "algebra", "placement/typing.py", "fit.py", "lemmas.py", "solver.py")  # folders and files
_TYPES = ("factors", "inference", "layout", "parallel")
_FORMS = ("attributes", "equations", "expressions", "pattern", "placement", "rowrules", "steps", "terms")


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
        facts = (row.name, row.offset, row.random, row.linear_in, row.differentiable, row.moves, row.indexes, row.free)
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
    from shardwright.verifier.solver import version

    axioms, failure = prove(rule)
    return str(failure) if failure else Certificate(rule.hash, rule.name, axioms, rule_guard(rule), version())


def prove(rule: Rule) -> tuple[tuple[str, ...], Failure | None]:
    """The axioms of a proof, or what broke. Z3 is only loaded here."""
    from shardwright.verifier.fit import checked

    axioms, failure = _prove(rule)
    return axioms, checked(rule, failure)


def _prove(rule: Rule) -> tuple[tuple[str, ...], Failure | None]:
    if isinstance(rule, RowRule):
        from shardwright.verifier.rows import rowproof

        proof = rowproof.proven(rule)
        return proof.axioms, proof.failure
    if isinstance(rule, Equation):
        from shardwright.verifier.algebra.serialproof import prove_terms

        if rule.axes:
            from shardwright.verifier.placement.typing import prove_placement

            proved = prove_placement(rule)
            return proved.axioms, proved.failure
        proof = prove_terms(rule, rule.left, rule.right)
        return proof.axioms, proof.failure
    from shardwright.verifier.rows.stepproof import prove_steps

    return ("digits", "linear-sum"), prove_steps(rule)


def rule_guard(rule: Rule) -> tuple[str, ...]:
    """The conditions of a rule as text."""
    return tuple(map(str, rule.guard))


def reprove(rules: Iterable[Rule]) -> Iterator[tuple[Rule, Certificate | str]]:
    """Prove every rule anew."""
    return ((rule, certify(rule)) for rule in rules)
