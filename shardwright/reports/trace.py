"""The rewrite trace: the certified rules that changed the model's operators, their places, and their certificates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwright.reports.again import names_of
from shardwright.reports.facts import PlanFacts
from shardwright.reports.report import Paragraph
from shardwright.reports.wording import rewrites

NO_REWRITE = "none: the operators are the model's own"


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule that was applied at the same place of several blocks, `count` times in all.

    blocks    their names, "" outside blocks
    between   the names, in a block, of the values around the changed part
    """

    rule: str
    blocks: str
    between: str
    count: int


@dataclass(frozen=True, slots=True)
class Proven:
    """A rule as this Shardwright knows it by name: its equation, its SHA-256, and its certificate.

    sha256    "" where this Shardwright has no such rule
    proofs    of the certificate, `axioms` of the first of them; none where there is no certificate
    """

    rule: str
    equation: str = ""
    sha256: str = ""
    proofs: tuple[str, ...] = ()
    axioms: tuple[str, ...] = ()
    solver: str = ""
    scope: str = ""

    @property
    def how(self) -> str:
        """The proofs in words."""
        if not self.sha256:
            return (
                "not among the rules of this Shardwright; `shardwright rules show NAME FILE` tells of those of a file"
            )
        if not self.proofs:
            return "this Shardwright has no certificate of it"
        return f"{' and, independently, '.join(self.proofs)}; {self.solver}"


def applied(facts: PlanFacts) -> list[Applied]:
    """Return all rules that a plan applies, in its order; uses at equal places of blocks are merged."""
    counts = defaultdict[tuple[str, str], Counter[str]](Counter)
    for rewrite in facts.plan.report.rewrites:
        starts, ends = (list(_values(facts, side)) for side in (rewrite.start, rewrite.end))
        block = next((block for block, _ in (*ends, *starts) if block), "")
        between = " → ".join(", ".join(dict.fromkeys(label for _, label in side)) for side in (starts, ends))
        for rule, _ in rewrite.steps:
            counts[rule, between][block] += 1
    return [
        Applied(rule, names_of(filter(None, blocks)), between, blocks.total())
        for (rule, between), blocks in counts.items()
    ]


def _values(facts: PlanFacts, side: str) -> Iterator[tuple[str, str]]:
    """Yield block and name of the values of one side, without constants computed from nothing, such as masks."""
    nodes = facts.graph.by_name
    for name in side.split():
        if name not in facts.constants or nodes[name].is_leaf:
            yield facts.names.of(name)


def proven(facts: PlanFacts) -> list[Proven]:
    """Return the rules that a plan applies, each with its certificate."""
    names = dict.fromkeys(rule for rewrite in facts.plan.report.rewrites for rule, _ in rewrite.steps)
    if not names:
        return []
    from shardwright.substitutions.rules.catalogue import CATALOGUE
    from shardwright.verifier.store import Verdicts

    verdicts = Verdicts.here()

    def known(name: str) -> Proven:
        rule = CATALOGUE.get(name)
        if rule is None:
            return Proven(name)
        rule_proven = Proven(name, rule.equation, rule.hash)
        certificate = verdicts.certificate(rule.hash, rule.to_json())
        return (
            replace(
                rule_proven,
                proofs=certificate.proofs,
                axioms=certificate.axioms,
                solver=certificate.solver,
                scope=certificate.scope,
            )
            if certificate
            else rule_proven
        )

    return list(map(known, names))


def rewrite_trace(facts: PlanFacts) -> list[Paragraph]:
    """Return the trace for people: rules with their places, and the certificates."""
    title, rules = "Rewrites", proven(facts)
    if not rules:
        return [Paragraph(title, [NO_REWRITE])]
    lines = [f"certified rules changed the model's own operators: {rewrites(facts.plan)}"]
    places = [(str(row.count), row.rule, row.blocks or "in no block", row.between) for row in applied(facts)]
    scopes = [f"proven {scope}" for scope in dict.fromkeys(rule.scope for rule in rules if rule.scope)]
    notes = ["`shardwright rules show NAME` draws both sides of a rule, with what its proofs rest on"]
    certificates = [(rule.rule, rule.how, rule.sha256) for rule in rules]
    return [
        Paragraph(title, lines, (">times", "rule", "blocks", "between"), places),
        Paragraph("Certificates of rewrites", scopes, ("rule", "proven by", "SHA-256"), certificates, notes),
    ]


def trace_data(facts: PlanFacts) -> dict[str, Any]:
    """Return the same for programs."""
    rules = [{**asdict(rule), "how": rule.how} for rule in proven(facts)]
    return {"applied": [asdict(row) for row in applied(facts)], "certificates": rules, "none": NO_REWRITE}
