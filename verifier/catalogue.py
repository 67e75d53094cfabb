"""The catalogue: a file of rules (docs/rules.md), and their certificates, which such a file does not contain.

    {"version": 1, "generator": {…}, "rules": [
    {"form": "equation", "name": "linear_of_sum", …},
    …]}

One catalogue is shipped (`rules.json`, all rules that the model zoo needs), with its proofs beside it (`store`), by
rule hash. A missing rule is proven on demand, in milliseconds, and kept for the process. After a change to the prover
or to the semantics of a row, all shipped proofs are ignored and everything is proven anew.

This reader is for files that we wrote: it hashes every rule and parses a rule only when it is asked for. `rulefile`
reads files of any origin, and reports the problem of each rule.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.files import write_whole
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.fields import digest, shown
from shardwright.substitutions.rules.rules import Rule, json_kind, json_name, rule_from_json
from shardwright.verifier.certificates import Certificate
from shardwright.verifier.store import Verdicts

VERSION = 1
SHIPPED = Path(__file__).with_name("rules.json")
NOTES = ("certificate", "implied_by", "search")
"""The fields of an entry besides its rule. A certificate there is ignored: older versions wrote one."""


@dataclass(frozen=True, slots=True)
class Note:
    """The facts about a rule in a catalogue besides its proof.

    implied_by    names of rules of the catalogue from which this one follows; the search needs only those
    search        True if the search tries the rule; other rules are steps of proofs
    """

    implied_by: tuple[str, ...] = ()
    search: bool = True


PLAIN = Note()


@dataclass
class Catalogue:
    """Rules and their certificates, by rule hash."""

    certificates: dict[str, Certificate] = field(default_factory=dict)
    generator: Mapping[str, Any] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)
    _data: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _rules: dict[str, Rule] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    @property
    def rules(self) -> Mapping[str, Rule]:
        """The rules by hash; those of a file are parsed now."""
        return {key: self.rule(key) for key in self}

    def rule(self, key: str) -> Rule:
        """Return the rule with this hash."""
        if key not in self._rules:
            self._rules[key] = rule_from_json(self._data[key])
        return self._rules[key]

    def note(self, key: str) -> Note:
        """Return the note of the rule with this hash."""
        return self.notes.get(key, PLAIN)

    def add(self, rule: Rule, certificate: Certificate | None = None, note: Note = PLAIN) -> None:
        """Add a rule, with its certificate if it has one."""
        self._rules[rule.hash] = rule
        self.take(rule.hash, rule.to_json(), certificate, note)

    def take(self, key: str, data: Mapping[str, Any], certificate: Certificate | None, note: Note = PLAIN) -> None:
        """Add a rule with this hash and JSON form, which is parsed only when it is asked for."""
        self._data[key] = data
        if certificate is not None:
            self.certificates[key] = certificate
        if note != PLAIN:
            self.notes[key] = note

    def merge(self, other: Catalogue, forms: Collection[str]) -> None:
        """Add the other catalogue's rules of these forms, with their certificates and notes."""
        for key in other:
            data = other.json(key)
            if key not in self and data["form"] in forms:
                self._data[key] = data
                if key in other.certificates:
                    self.certificates[key] = other.certificates[key]
                if key in other.notes:
                    self.notes[key] = other.notes[key]

    def searched(self) -> tuple[Equation, ...]:
        """Return the certified serial equations for a search: neither implied by others nor steps of proofs."""
        proven = (key for key in self if key in self.certificates and self.note(key) == PLAIN)
        wanted = (self.rule(key) for key in proven if json_kind(self.json(key)) == "serial")
        return tuple(rule for rule in wanted if isinstance(rule, Equation))

    def forms(self) -> frozenset[str]:
        """Return the forms of rules in the catalogue."""
        return frozenset(str(self.json(key)["form"]) for key in self)

    def json(self, key: str) -> Mapping[str, Any]:
        """Return the JSON form of a rule, without its certificate."""
        return self._data[key]

    def save(self, path: Path) -> None:
        """Write the rules, one a line."""
        lines = [json.dumps(self._entry(key), ensure_ascii=False) for key in self.sorted()]
        head = {"version": VERSION, "generator": self.generator}
        text = json.dumps(head, ensure_ascii=False)[:-1] + ', "rules": [\n' + ",\n".join(lines) + "\n]}\n"
        write_whole(path, text, "the rules", RuleError, make_folder=True)

    def sorted(self) -> list[str]:
        """Return the hashes of all rules: rows, steps and equations, each by name."""
        order = {"row": 0, "steps": 1, "equation": 2}

        def place(key: str) -> tuple[int, str, str]:
            data = self.json(key)
            return order[str(data["form"])], json_name(data), key

        return sorted(self, key=place)

    def _entry(self, key: str) -> dict[str, Any]:
        entry, note = dict(self.json(key)), self.note(key)
        if note.implied_by:
            entry["implied_by"] = list(note.implied_by)
        if not note.search:
            entry["search"] = False
        return entry

    @classmethod
    def load(cls, path: Path = SHIPPED) -> Catalogue:
        """Read a catalogue that we wrote; return an empty one if there is no file. Certificates are the package's.

        Raises `RuleError` for a file that is not a catalogue, or of another version.
        """
        if not path.exists():
            return cls()
        data, proven = read_head(path), Verdicts.shipped()
        catalogue = cls(generator=data.get("generator") or {})
        for entry in data["rules"]:
            key, rule = plain(entry)
            note = Note(tuple(entry.get("implied_by", ())), entry.get("search", True))
            catalogue.take(key, rule, proven.certificate(key, rule), note)
        return catalogue


def plain(entry: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the hash and the JSON form of an entry's rule, without notes."""
    data = {name: value for name, value in entry.items() if name not in NOTES}
    return digest(data), data


MAX_BYTES = 1 << 28


def read_head(path: Path) -> Mapping[str, Any]:
    """Return the JSON of a rule file. Its version and the list of rules are checked, but not the rules themselves.

    A key that occurs twice in an object is renamed, so that the reader of the object rejects it.
    """
    data = _parsed(path)
    if not isinstance(data, dict) or not {"version", "rules"} <= data.keys():
        got = f"the fields {sorted(data)[:8]}" if isinstance(data, dict) else shown(data)
        raise RuleError(f"{path}: expected an object with the fields 'version' and 'rules' (docs/rules.md), got {got}")
    if data["version"] != VERSION or isinstance(data["version"], bool):
        raise RuleError(
            f"{path}: version {shown(data['version'])}, expected {VERSION}; generate the file again, or use the "
            "release of Shardwright that wrote it"
        )
    unknown = data.keys() - {"version", "rules", "prover", "generator"}
    if unknown:
        raise RuleError(f"{path}: unknown field {min(unknown)!r}; expected version, prover, generator and rules")
    if not isinstance(data["rules"], list):
        raise RuleError(f"{path}: field 'rules': expected a list of rules, got {shown(data['rules'])}")
    for key in ("prover", "generator"):
        if not isinstance(data.get(key, {}), dict):
            raise RuleError(f"{path}: field {key!r}: expected an object, got {shown(data[key])}")
    return data


def _parsed(path: Path) -> object:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        advice = "check the path, or make one with `shardwright rules generate`"
        raise RuleError(f"{path}: there is no such rule file; {advice}") from None
    except OSError as error:
        raise RuleError(f"{path}: cannot read the rule file ({error.strerror}); check the path") from None
    if len(content) > MAX_BYTES:
        raise RuleError(f"{path}: more than {MAX_BYTES >> 20} MiB; is it a rule file?")
    if not content.strip():
        raise RuleError(f"{path}: the file is empty; expected rules (docs/rules.md)")
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise RuleError(f"{path}: expected JSON text in UTF-8, got other bytes; is it a rule file?") from None
    except json.JSONDecodeError as error:
        advice = "the file is truncated or edited wrongly"
        raise RuleError(f"{path}: line {error.lineno}: expected JSON, got: {error.msg}; {advice}") from None
    except RecursionError:
        raise RuleError(f"{path}: expected rules, got JSON nested too deeply") from None
    except ValueError as error:  # a number with more digits than Python reads
        raise RuleError(f"{path}: expected rules, got a value that cannot be read: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        values[f"{key} (given twice)" if key in values else key] = value
    return values
