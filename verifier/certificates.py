"""Certificates: which rules are proven, from what, and with what. The search asks here and nowhere else.

A `Store` maps rule hashes to certificates. One is shipped (`certificates.json`, everything the model zoo needs); what
it lacks is proven on demand, in milliseconds, and kept for the process. The store names the prover it was made with;
after a change to the prover or to the semantics of a row, it is ignored as a whole and everything is proven anew.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.optable import ROWS, keep_attrs
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rowrules import RowRule
from shardwright.substitutions.rules import Rule, rule_from_json

VERSION = 1
SCOPE = "over the reals; all sizes that satisfy the guard; every degree k ≥ 1; forward and all gradients"
SHIPPED = Path(__file__).with_name("certificates.json")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A proven rule. `rule` is its hash, `axioms` the lemmas and declared facts that the proof uses."""

    rule: str
    name: str
    axioms: tuple[str, ...]
    guard: tuple[str, ...]
    solver: str
    scope: str = SCOPE


_PROVER = (
    "attributes", "claims", "elements", "lemmas", "normal", "rowproof", "semantics", "serialproof", "solver",
    "stepproof", "symbols",
)  # fmt: skip
_FORMS = ("equations", "expressions", "pattern", "placement", "rowrules", "steps", "terms")


@lru_cache(maxsize=1)
def prover_digest() -> str:
    """Names the prover: its source, the form of the rules, and the rows' code that runs on symbolic sizes."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for file in [here / f"{name}.py" for name in _PROVER] + [here.parent / "substitutions" / f"{n}.py" for n in _FORMS]:
        digest.update(file.read_bytes())
    for row in ROWS.values():
        facts = (row.name, row.offset, row.random, row.linear_in)
        source = "" if row.localize is keep_attrs else inspect.getsource(row.localize)
        digest.update(repr((facts, source)).encode())
    return digest.hexdigest()[:16]


@dataclass
class Store:
    """Certificates by rule hash, with the rules they are for."""

    certificates: dict[str, Certificate] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)

    def add(self, rule: Rule, certificate: Certificate) -> None:
        self.certificates[certificate.rule] = certificate
        self.rules[certificate.rule] = rule

    def save(self, path: Path) -> None:
        """Write the store, one rule a line."""
        solver = sorted({c.solver for c in self.certificates.values()})
        head = {"version": VERSION, "prover": prover_digest(), "solver": solver, "scope": SCOPE}
        lines = [
            json.dumps({"rule": key, **self.rules[key].to_json(), "axioms": list(self.certificates[key].axioms)})
            for key in sorted(self.rules, key=lambda key: (self.rules[key].name, key))
        ]
        body = ",\n".join(lines)
        path.write_text(json.dumps(head)[:-1] + ', "certificates": [\n' + body + "\n]}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path = SHIPPED) -> Store:
        """Read a store. It comes back empty where another prover made it, or where there is none.

        Raises `RuleError` for a file that is not a store, or of another version.
        """
        if not path.exists():
            return cls()
        data = _read(path)
        if data["prover"] != prover_digest():
            return cls()
        store, solver = cls(), ", ".join(data["solver"])
        for entry in data["certificates"]:
            rule = rule_from_json(entry)
            store.add(rule, Certificate(entry["rule"], rule.name, tuple(entry["axioms"]), rule_guard(rule), solver))
        return store


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RuleError(f"{path}: not a store of certificates: {error}") from None
    missing = {"version", "prover", "solver", "certificates"} - set(data if isinstance(data, dict) else ())
    if missing:
        raise RuleError(f"{path}: not a store of certificates: no field {sorted(missing)[0]!r}")
    if data["version"] != VERSION:
        raise RuleError(f"{path}: store version {data['version']}, expected {VERSION}; delete it to prove anew")
    return data


def certify(rule: Rule) -> Certificate | str:
    """Prove a rule now: its certificate, or why there is none."""
    from shardwright.verifier.solver import version

    axioms, failure = _prove(rule)
    return str(failure) if failure else Certificate(rule.hash, rule.name, axioms, rule_guard(rule), version())


def _prove(rule: Rule) -> tuple[tuple[str, ...], object]:
    """The axioms of a proof, or what broke. Z3 is only loaded here."""
    if isinstance(rule, RowRule):
        from shardwright.verifier.rowproof import prove

        proof = prove(rule)
        return proof.axioms, proof.failure
    if isinstance(rule, Equation):
        from shardwright.verifier.serialproof import prove_equation

        return ("index-semantics", "linear-sum"), prove_equation(rule)
    from shardwright.verifier.stepproof import prove_steps

    return ("digits", "linear-sum"), prove_steps(rule)


def rule_guard(rule: Rule) -> tuple[str, ...]:
    """The conditions of a rule as text."""
    return tuple(map(str, rule.guard))


def reprove(rules: Iterable[Rule]) -> Iterator[tuple[Rule, Certificate | str]]:
    """Prove every rule anew."""
    return ((rule, certify(rule)) for rule in rules)
