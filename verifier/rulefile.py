"""Reads rule files of any origin: what is wrong with one rule is said of that rule, and the others are still judged.

rules.json: rules[3] 'fuse': field 'left[0]': term 'linea(x, w)': operator 'linea' has no row in the op table
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions import fields
from shardwright.substitutions.rules import Rule, kind_of, rule_from_json
from shardwright.verifier.catalogue import NOTES, Catalogue, Note, read_head
from shardwright.verifier.certificates import PROOFS, SCOPE, Certificate, prover_digest, rule_guard


@dataclass(frozen=True, slots=True)
class Entry:
    """One rule of a file: the rule, or the problem that it has.

    position      its place in the list, from 0
    name          as the file gives it; "?" where it gives none
    certificate   as the file gives it, if this prover made it
    """

    position: int
    name: str
    rule: Rule | None = None
    problem: str = ""
    certificate: Certificate | None = None
    note: Note = field(default_factory=Note)

    @property
    def where(self) -> str:
        """The rule as errors name it."""
        return f"rules[{self.position}] {self.name!r}"


@dataclass(frozen=True)
class RuleFile:
    """What a file says, rule by rule."""

    path: Path
    generator: Mapping[str, Any]
    entries: tuple[Entry, ...]

    @property
    def good(self) -> Iterator[tuple[Entry, Rule]]:
        """The entries that hold a rule."""
        return ((entry, entry.rule) for entry in self.entries if entry.rule is not None)

    @property
    def malformed(self) -> tuple[Entry, ...]:
        """The entries that hold none."""
        return tuple(entry for entry in self.entries if entry.rule is None)

    def catalogue(self) -> Catalogue:
        """Its good rules, with the certificates that hold here."""
        found = Catalogue(generator=self.generator)
        for entry, rule in self.good:
            found.add(rule, entry.certificate, entry.note)
        return found

    def named(self, name: str) -> Entry:
        """The rule of this name; a `RuleError` lists close ones where there is none."""
        return find(name, self.entries, str(self.path))


def find(name: str, entries: Iterable[Entry], where: str) -> Entry:
    """The entry of this name, or the only one whose name holds the text."""
    found = list(entries)
    exact = [entry for entry in found if entry.name == name]
    close = exact or [entry for entry in found if name.lower() in entry.name.lower()]
    if len(close) == 1 or exact:
        return close[0]
    if not close:
        raise RuleError(f"{where}: no rule is called {name!r}; `shardwright rules list` shows all {len(found)}")
    shown = ", ".join(repr(entry.name) for entry in close[:6]) + (", …" if len(close) > 6 else "")
    raise RuleError(f"{where}: {len(close)} rules have {name!r} in their names; say which: {shown}")


def read_rules(path: Path) -> RuleFile:
    """Read a rule file; a `RuleError` only where the file as a whole is none. Problems of rules are in `entries`."""
    data = read_head(path)
    prover = data.get("prover") or {}
    entries = tuple(_entry(position, item, prover) for position, item in enumerate(data["rules"]))
    return RuleFile(path, data.get("generator") or {}, tuple(_related(_distinct(entries))))


def _entry(position: int, item: object, prover: Mapping[str, Any]) -> Entry:
    name = fields.name_of(item)
    try:
        if not isinstance(item, dict):
            raise RuleError(f"expected an object, got {fields.shown(item)}")
        rule = rule_from_json({key: value for key, value in item.items() if key not in NOTES})
        with fields.located(f"rule {rule.name!r}"):
            note = Note(fields.texts(item, "implied_by"), fields.flag(item, "search", default=True))
            certificate = _certificate(rule, item.get("certificate"), prover)
    except RuleError as error:
        return Entry(position, name, None, str(error))
    return Entry(position, rule.name, rule, "", certificate, note)


def _certificate(rule: Rule, data: object, prover: Mapping[str, Any]) -> Certificate | None:
    """The certificate of an entry, checked; None where there is none, or another prover made it."""
    if data is None:
        return None
    with fields.located("field 'certificate'"):
        given = fields.record(data, ("axioms",), ("guard", "solver", "scope", "prover"))
        axioms = fields.texts(given, "axioms")
        told = {"digest": "", "solver": "", "scope": SCOPE, **prover}
        digest = fields.text(given, "prover") if "prover" in given else told["digest"]
        solver, scope = (fields.text(given, key) if key in given else told[key] for key in ("solver", "scope"))
        guard = fields.texts(given, "guard") if "guard" in given else rule_guard(rule)
    if digest != prover_digest() or guard != rule_guard(rule):
        return None
    return Certificate(rule.hash, rule.name, axioms, guard, str(solver), PROOFS[kind_of(rule)], str(scope))


def _distinct(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The first rule of a name keeps it."""
    first: dict[str, int] = {}
    for entry in entries:
        if entry.rule is not None and first.setdefault(entry.name, entry.position) != entry.position:
            problem = f"field 'name': {entry.name!r} is the name of rules[{first[entry.name]}] already"
            entry = replace(entry, rule=None, problem=problem)
        yield entry


def _related(entries: Iterable[Entry]) -> Iterator[Entry]:
    """`implied_by` names rules of the file, and no rule follows from itself."""
    found = list(entries)
    names = {entry.name for entry in found}
    grounded = _grounded({entry.name: entry.note.implied_by for entry in found if entry.rule is not None})
    for entry in found:
        strange = [name for name in entry.note.implied_by if name not in names]
        if entry.rule is None or (not strange and entry.name in grounded):
            yield entry
        else:
            wrong = f"the file has no rule {strange[0]!r}" if strange else "it is implied by itself, in a circle"
            yield replace(entry, rule=None, problem=f"rule {entry.name!r}: field 'implied_by': {wrong}")


def _grounded(implied_by: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The rules that follow, step by step, from rules that nothing implies; names that are no rules do not count."""
    sorter = TopologicalSorter({name: [n for n in names if n in implied_by] for name, names in implied_by.items()})
    with suppress(CycleError):  # it sorts what is in no circle and follows from none
        sorter.prepare()
    grounded: set[str] = set()
    while ready := sorter.get_ready():
        grounded.update(ready)
        sorter.done(*ready)
    return grounded
