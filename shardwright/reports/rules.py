"""Rules: a list with a line for each, and a report on one with both graphs and its proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.reports.report import Paragraph, Report
from shardwright.substitutions.rules.rowrules import RowRule
from shardwright.substitutions.rules.rules import Rule, kind_of
from shardwright.substitutions.rules.steps import StepRule, SymbolicStep
from shardwright.substitutions.terms import Apply, Term, Variable, applied
from shardwright.verifier.catalogue import SHIPPED
from shardwright.verifier.certificates import Certificate
from shardwright.verifier.rulefile import Entry, RuleFile, read_rules
from shardwright.verifier.store import Verdicts

if TYPE_CHECKING:
    from shardwright.verifier.describe import TermTypes


def operators(rule: Rule) -> frozenset[str]:
    """Return the operators in a rule."""
    if isinstance(rule, RowRule):
        return frozenset([rule.row])
    if isinstance(rule, StepRule):
        return frozenset(move.op for move in (*rule.left, *rule.right))
    return frozenset(term.op for term in applied((*rule.left, *rule.right)))


@dataclass(frozen=True)
class RuleListReport(Report):
    """Some rules of a file, each in a line."""

    file: RuleFile
    chosen: Sequence[tuple[Entry, Rule]]
    verdicts: Verdicts

    def paragraphs(self) -> list[Paragraph]:
        rows = [(rule.name, kind_of(rule), self._mark(entry), rule.equation) for entry, rule in self.chosen]
        title = f"{self.file.path}: {len(rows)} of {len(self.file.entries)} rules"
        return [Paragraph(title, [], ("name", "form", "proof", "equation"), rows)]

    def data(self) -> list[dict[str, Any]]:
        return [RuleReport(entry, rule, self.verdicts).data() for entry, rule in self.chosen]

    def _mark(self, entry: Entry) -> str:
        if entry.note.implied_by:
            return "implied"
        return "certified" if self.verdicts.certificate(entry.key, entry.data) else "-"


@dataclass(frozen=True)
class RuleReport(Report):
    """A rule with all its facts, and this machine's verdict on its proof."""

    entry: Entry
    rule: Rule
    verdicts: Verdicts

    @property
    def certificate(self) -> Certificate | None:
        return self.verdicts.certificate(self.entry.key, self.entry.data)

    def paragraphs(self) -> list[Paragraph]:
        rule = self.rule
        facts = [f"equation  {rule.equation}", f"guard     {', '.join(map(str, rule.guard)) or 'none'}"]
        facts += [f"{key:<9} {value}" for key, value in _facts(rule).items()]
        head = Paragraph(f"{rule.name}: {_KINDS[kind_of(rule)]}", facts)
        return [head, *_sides(rule), Paragraph("proof", list(self._proof()))]

    def _proof(self) -> Iterator[str]:
        certificate, note = self.certificate, self.entry.note
        if certificate is not None:
            yield f"certified by {certificate.solver}, {certificate.scope}"
            yield f"proven by {' and, independently, by '.join(certificate.proofs)}"
            yield from _axioms(certificate.axioms)
        elif failure := self.verdicts.failure(self.entry.key):
            yield from ["judged on this machine, and not certified:", *failure.splitlines()]
        else:
            yield "not judged on this machine yet; `shardwright rules verify` does it now"
        if note.implied_by:
            yield f"implied by {', '.join(note.implied_by)}"
        if not note.search:
            yield "not tried by the search: a step of proofs"

    def data(self) -> dict[str, Any]:
        entry, rule, certificate = self.entry, self.rule, self.certificate
        return {
            **rule.to_json(),
            "name": rule.name,
            "kind": kind_of(rule),
            "equation": rule.equation,
            "guard": list(map(str, rule.guard)),
            "hash": rule.hash,
            "operators": sorted(operators(rule)),
            "certificate": None if certificate is None else {
                "proofs": list(certificate.proofs),
                "axioms": list(certificate.axioms), "statements": _statements(certificate.axioms),
                "solver": certificate.solver, "scope": certificate.scope,
            },
            "implied_by": list(entry.note.implied_by),
            "search": entry.note.search,
        }  # fmt: skip


_KINDS = {
    "row": "an operator split along one mesh axis (row)",
    "steps": "chains of parallel operators (steps)",
    "serial": "serial terms (equation)",
    "placement": "placements of terms on mesh axes (equation)",
}


def _facts(rule: Rule) -> Mapping[str, str]:
    if isinstance(rule, RowRule):
        facts = {"told": ", ".join(rule.local)} if rule.local else {}
        return {"pattern": rule.pattern, "split": rule.factor or "nothing: passed through", **facts}
    if isinstance(rule, StepRule):
        sums = any(move.op.startswith("reduce") for move in (*rule.left, *rule.right))
        return {"values": "equal over the reals: sums over devices are taken" if sums else _EXACT}
    given = {"values": _EXACT if rule.moves else "equal over the reals: sums and products are reordered"}
    if rule.parameters:
        given["chosen"] = f"{', '.join(rule.parameters)} by whoever applies the rule, as the guard allows"
    if rule.axes:
        given["serial"] = rule.erased.equation if rule.erased else "both sides are one serial term"
    return given


_EXACT = "equal bit for bit: only data moves"


def _statements(axioms: Sequence[str]) -> Mapping[str, str]:
    from shardwright.verifier.lemmas import statement

    return {axiom: said for axiom in axioms if (said := statement(axiom))}


def _axioms(axioms: Sequence[str]) -> Iterator[str]:
    """Yield the axioms of a proof with their statements; a shipped row rule that types a placement has its name."""
    from shardwright.verifier.lemmas import TRUSTED, statement

    shipped: dict[str, str] | None = None
    plain = [axiom for axiom in axioms if not axiom.startswith("row ")]
    width = max(map(len, plain), default=0)
    for title, trusted in (("rests on, proven by Z3:", False), ("rests on, trusted:", True)):
        chosen = [a for a in plain if (a in TRUSTED or not statement(a)) == trusted]
        if chosen:
            yield title
            yield from (f"  {a.ljust(width)}  {statement(a)}".rstrip() for a in chosen)
    for row in (axiom.removeprefix("row ") for axiom in axioms if axiom.startswith("row ")):
        shipped = shipped or {rule.hash: rule.name for _, rule in read_rules(SHIPPED).good}
        yield f"and on the row rule {shipped.get(row, row)}"


def _sides(rule: Rule) -> list[Paragraph]:
    """Return both sides: as graphs, as chains of steps, or the layouts of a row."""
    if isinstance(rule, RowRule):
        return [_layouts(rule)]
    if isinstance(rule, StepRule):
        chains = {"left": rule.left, "right": rule.right}
        return [Paragraph(side, list(_chain(rule, moves))) for side, moves in chains.items()]
    from shardwright.verifier.describe import TermTypes

    types, graphs = TermTypes(rule), {"left": rule.left, "right": rule.right}
    return [Paragraph(side, list(_forest(roots, types))) for side, roots in graphs.items()]


def _chain(rule: StepRule, moves: Sequence[SymbolicStep]) -> Iterator[str]:
    """Yield the layouts at the start and after every step."""
    yield "start".ljust(28) + _places(rule.end(()))
    for i, move in enumerate(moves):
        yield str(move).ljust(28) + _places(rule.end(tuple(moves[: i + 1])))


def _places(places: Mapping[str, object]) -> str:
    return ", ".join(f"{axis}: {place}" for axis, place in places.items())


def _layouts(rule: RowRule) -> Paragraph:
    dims = [side.strip() for side in rule.pattern.replace("->", ",").split(",")]
    rows = [(f"x{i}", side, str(p), str(p.dual)) for i, (side, p) in enumerate(zip(dims, rule.operands, strict=False))]
    rows.append(("result", dims[-1], str(rule.result), str(rule.result.dual)))
    return Paragraph("layouts along the axis", [], ("", "dims", "layout", "its gradient"), rows)


def _forest(roots: Sequence[Term], types: TermTypes) -> Iterator[str]:
    """Yield graphs as indented trees; a term that was drawn before is referred to by its number."""
    uses = Counter(term for root in roots for term in _nodes(root))
    shared = [term for term, times in uses.items() if times > 1 and isinstance(term, Apply)]
    numbers: dict[Term, int] = {term: number for number, term in enumerate(shared, start=1)}
    drawn: set[Term] = set()
    lines = [item for root in roots for item in _tree(root, "", "", numbers, drawn)]
    width = max(len(text) for text, _ in lines) + 2
    for text, term in lines:
        yield (text.ljust(width) + types(term)).rstrip()


def _nodes(term: Term) -> Iterator[Term]:
    yield term
    for operand in term.operands if isinstance(term, Apply) else ():
        yield from _nodes(operand)


def _tree(
    term: Term, here: str, below: str, numbers: Mapping[Term, int], drawn: set[Term]
) -> Iterator[tuple[str, Term]]:
    if isinstance(term, Variable):
        yield here + term.name, term
        return
    mark = f" #{numbers[term]}" if term in numbers else ""
    if term in drawn:
        yield f"{here}{term.op}{mark}, as above", term
        return
    drawn.add(term)
    attrs = ", ".join(f"{key}={value}" for key, value in term.attrs)
    yield f"{here}{term.op}{f' {attrs}' if attrs else ''}{mark}", term
    for i, operand in enumerate(term.operands):
        last = i == len(term.operands) - 1
        yield from _tree(
            operand, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), numbers, drawn
        )
