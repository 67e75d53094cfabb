"""Rules as text: one line for a list, and sections with both graphs for `shardwright rules show`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardwright.search.sections import Explanation, Section, Table
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rowrules import RowRule
from shardwright.substitutions.rules import Rule, kind_of
from shardwright.substitutions.steps import StepRule, SymbolicStep
from shardwright.substitutions.terms import Apply, Term, Variable, subterms
from shardwright.verifier.catalogue import SHIPPED
from shardwright.verifier.rulefile import Entry, read_rules

TypeOf = Callable[[Term], str]


def operators(rule: Rule) -> frozenset[str]:
    """The operators that a rule speaks about."""
    if isinstance(rule, RowRule):
        return frozenset([rule.row])
    if isinstance(rule, StepRule):
        return frozenset(move.op for move in (*rule.left, *rule.right))
    terms = (term for root in (*rule.left, *rule.right) for term in subterms(root))
    return frozenset(term.op for term in terms if isinstance(term, Apply))


def explain_rule(entry: Entry, rule: Rule) -> Explanation:
    """Everything there is to say of a rule."""
    title = f"{rule.name}: {_KINDS[kind_of(rule)]}"
    facts = [f"equation  {rule.equation}", f"guard     {', '.join(map(str, rule.guard)) or 'none'}"]
    facts += [f"{key:<9} {value}" for key, value in _facts(rule).items()]
    sections = [Section(title, tuple(facts))]
    if isinstance(rule, Equation):
        type_of = types(rule)
        sections += [Section(side, tuple(_forest(roots, type_of))) for side, roots in _sides(rule)]
    elif isinstance(rule, StepRule):
        sections += [Section(side, tuple(_chain(rule, moves))) for side, moves in _chains(rule)]
    else:
        sections.append(Section("layouts along the axis", (), _layouts(rule)))
    sections.append(Section("proof", tuple(_proof(entry))))
    return Explanation(tuple(sections))


_KINDS = {
    "row": "an operator split along one mesh axis (row)",
    "steps": "chains of parallel operators (steps)",
    "serial": "serial terms (equation)",
    "placement": "placements of terms on mesh axes (equation)",
}


def describe(entry: Entry, rule: Rule) -> dict[str, Any]:
    """The same as plain data."""
    certificate = entry.certificate
    return {
        **rule.to_json(),
        "name": rule.name,
        "kind": kind_of(rule),
        "equation": rule.equation,
        "guard": list(map(str, rule.guard)),
        "hash": rule.hash,
        "operators": sorted(operators(rule)),
        "certificate": None if certificate is None else {
            "axioms": list(certificate.axioms), "statements": _statements(certificate.axioms),
            "solver": certificate.solver, "scope": certificate.scope,
        },
        "implied_by": list(entry.note.implied_by),
        "search": entry.note.search,
    }  # fmt: skip


def _facts(rule: Rule) -> Mapping[str, str]:
    if isinstance(rule, RowRule):
        told = {"told": ", ".join(rule.local)} if rule.local else {}
        return {"pattern": rule.pattern, "split": rule.factor or "nothing: passed through", **told}
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


def _proof(entry: Entry) -> Iterator[str]:
    found = entry.certificate
    if found is None:
        yield "no certificate of this prover in the file; `shardwright rules verify` judges the rule now"
    else:
        yield f"certified by {found.solver}, {found.scope}"
        yield from _axioms(found.axioms)
    if entry.note.implied_by:
        yield f"implied by {', '.join(entry.note.implied_by)}"
    if not entry.note.search:
        yield "not tried by the search: a step of proofs"


def _axioms(axioms: Sequence[str]) -> Iterator[str]:
    """What the proof rests on, each with what it says; the row rules that type a placement by name, where shipped."""
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


def _sides(rule: Equation) -> Iterator[tuple[str, Sequence[Term]]]:
    yield "left", rule.left
    yield "right", rule.right


def _chains(rule: StepRule) -> Iterator[tuple[str, Sequence[SymbolicStep]]]:
    yield "left", rule.left
    yield "right", rule.right


def _chain(rule: StepRule, moves: Sequence[SymbolicStep]) -> Iterator[str]:
    """The layouts at the start and after every step."""
    yield "start".ljust(28) + _places(rule.end(()))
    for i, move in enumerate(moves):
        yield str(move).ljust(28) + _places(rule.end(tuple(moves[: i + 1])))


def _places(places: Mapping[str, object]) -> str:
    return ", ".join(f"{axis}: {place}" for axis, place in places.items())


def _layouts(rule: RowRule) -> Table:
    columns = (("", False), ("dims", False), ("layout", False), ("its gradient", False))
    dims = [side.strip() for side in rule.pattern.replace("->", ",").split(",")]
    rows = [(f"x{i}", side, str(p), str(p.dual)) for i, (side, p) in enumerate(zip(dims, rule.operands, strict=False))]
    return Table(columns, (*rows, ("result", dims[-1], str(rule.result), str(rule.result.dual))))


def _forest(roots: Sequence[Term], type_of: TypeOf) -> Iterator[str]:
    """Graphs as indented trees; what was drawn before is referred to by its number."""
    uses: dict[Term, int] = {}
    for root in roots:
        for term in _nodes(root):
            uses[term] = uses.get(term, 0) + 1
    numbers: dict[Term, int] = {
        term: i + 1 for i, term in enumerate(t for t, n in uses.items() if n > 1 and isinstance(t, Apply))
    }
    drawn: set[Term] = set()
    lines = [item for root in roots for item in _tree(root, "", "", numbers, drawn)]
    width = max(len(text) for text, _ in lines) + 2
    for text, term in lines:
        yield (text.ljust(width) + type_of(term)).rstrip()


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


def types(rule: Equation) -> TypeOf:
    """The dims and layouts of each term, as far as the verifier's semantics reach; "" beyond."""
    from shardwright.verifier.describe import TermTypes

    return TermTypes(rule)
