"""The reader of rule files of any origin: it reports the problem of each wrong rule, and the others are still judged.

A file only proposes rules; `store` knows which are proven.

rules.json: rules[3] 'fuse': field 'left[0]': term 'linea(x, w)': operator 'linea' has no row in the op table
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions import fields
from shardwright.substitutions.rules.rules import Rule, json_name, rule_from_json
from shardwright.verifier.catalogue import Note, plain, read_head


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a rule file: the rule, or its problem.

    position   its place in the list, from 0
    name       its name in the file; "?" if there is none
    key        the rule's hash
    data       its JSON form, without notes
    """

    position: int
    name: str
    problem: str = ""
    note: Note = field(default_factory=Note)
    key: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    _rule: Rule | None = None

    @property
    def rule(self) -> Rule | None:
        """The rule; a rule that was judged before is parsed only now."""
        return None if self.problem else self._rule or rule_from_json(self.data)

    @property
    def where(self) -> str:
        """The text that names the rule in errors."""
        return f"rules[{self.position}] {self.name!r}"


@dataclass(frozen=True)
class RuleFile:
    """A rule file, entry by entry."""

    path: Path
    generator: Mapping[str, Any]
    entries: tuple[Entry, ...]

    @property
    def good(self) -> Iterator[tuple[Entry, Rule]]:
        """The entries that have a rule."""
        return ((entry, rule) for entry in self.entries if (rule := entry.rule) is not None)

    @property
    def malformed(self) -> tuple[Entry, ...]:
        """The entries that have a problem."""
        return tuple(entry for entry in self.entries if entry.problem)

    def named(self, name: str) -> Entry:
        """Return the entry with this name; if there is none, raise a `RuleError` that lists close ones."""
        return find(name, self.entries, str(self.path))


def find(name: str, entries: Iterable[Entry], where: str) -> Entry:
    """Return the entry with this name, or the only one whose name contains the text."""
    listed = list(entries)
    exact = [entry for entry in listed if entry.name == name]
    close = exact or [entry for entry in listed if name.lower() in entry.name.lower()]
    if len(close) == 1 or exact:
        return close[0]
    if not close:
        raise RuleError(f"{where}: no rule is called {name!r}; `shardwright rules list` shows all {len(listed)}")
    shown = ", ".join(repr(entry.name) for entry in close[:6]) + (", …" if len(close) > 6 else "")
    raise RuleError(f"{where}: {len(close)} rules have {name!r} in their names; say which: {shown}")


def read_rules(path: Path, known: Container[str] = ()) -> RuleFile:
    """Read a rule file. Problems of rules are in `entries`; only an invalid file as a whole raises `RuleError`.

    Rules whose hash is `known` were read before, word for word, and are not parsed again.
    """
    data = read_head(path)
    entries = tuple(_entry(position, item, known) for position, item in enumerate(data["rules"]))
    return RuleFile(path, data.get("generator") or {}, tuple(_related(_distinct(entries))))


def _entry(position: int, item: object, known: Container[str]) -> Entry:
    name = fields.name_of(item)
    try:
        if not isinstance(item, dict):
            raise RuleError(f"expected an object, got {fields.shown(item)}")
        key, data, rule = *plain(item), None
        if key not in known or not _well_named(data):
            rule = rule_from_json(data)
            key, data = rule.hash, rule.to_json()
        name = json_name(data)
        with fields.located(f"rule {name!r}"):
            note = Note(fields.texts(item, "implied_by"), fields.flag(item, "search", default=True))
    except RuleError as error:
        return Entry(position, name, str(error))
    except RecursionError:
        return Entry(position, name, f"rule {name!r}: expected a rule, got JSON nested too deeply")
    return Entry(position, name, "", note, key, data, rule)


def _well_named(data: Mapping[str, Any]) -> bool:
    """Return whether the name, which is not part of the hash, fits the form of the rule."""
    return "name" not in data if data["form"] == "row" else bool(fields.name_of(data).strip(" ?"))


def _distinct(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries; of rules with equal names, all but the first get a problem."""
    first: dict[str, int] = {}
    for entry in entries:
        if not entry.problem and first.setdefault(entry.name, entry.position) != entry.position:
            problem = f"field 'name': {entry.name!r} is the name of rules[{first[entry.name]}] already"
            entry = replace(entry, problem=problem)
        yield entry


def _related(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries, with a problem if `implied_by` names no rule of the file, or a rule follows from itself."""
    listed = list(entries)
    names = {entry.name for entry in listed}
    grounded = _grounded({entry.name: entry.note.implied_by for entry in listed if not entry.problem})
    for entry in listed:
        strange = [name for name in entry.note.implied_by if name not in names]
        if entry.problem or (not strange and entry.name in grounded):
            yield entry
        else:
            wrong = f"the file has no rule {strange[0]!r}" if strange else "it is implied by itself, in a circle"
            yield replace(entry, problem=f"rule {entry.name!r}: field 'implied_by': {wrong}")


def _grounded(implied_by: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Return the rules that follow, step by step, from rules that nothing implies; unknown names do not count."""
    sorter = TopologicalSorter({name: [n for n in names if n in implied_by] for name, names in implied_by.items()})
    with suppress(CycleError):  # rules outside of circles are sorted
        sorter.prepare()
    grounded: set[str] = set()
    while ready := sorter.get_ready():
        grounded.update(ready)
        sorter.done(*ready)
    return grounded
