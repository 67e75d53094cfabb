"""The published schema and the reader of rule files agree, as far as a schema can say what the reader says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import shardwright.verifier
from shardwright.verifier.catalogue import SHIPPED
from shardwright.verifier.rulefile import read_rules
from tests.verifier.test_rulefile import GOOD, ROW, SERIAL, STEPS, at, changed, places

SCHEMA = json.loads((Path(shardwright.verifier.__file__).parent / "rules.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "rules.md"


def file(*rules: Any) -> dict[str, Any]:
    return {"version": 1, "rules": list(rules)}


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("rule", GOOD, ids=lambda rule: rule["form"])
def test_good_rules_fit(rule: dict[str, Any]) -> None:
    VALIDATOR.validate(file({**rule, "certificate": {"axioms": ["digits"]}, "implied_by": ["x"], "search": False}))


def test_the_shipped_catalogue_fits() -> None:
    VALIDATOR.validate(json.loads(SHIPPED.read_text(encoding="utf-8")))


ODD = (None, True, 0, 3.5, "", " ", "Q", [], {}, [3], {"x": 3}, ["("], "S(1)")


def cases() -> list[tuple[str, object, bool]]:
    """Rules of each form with one field replaced by odd values, removed, or with another beside it.

    The last entry says whether the change is one of type, which a schema can see.
    """
    found: list[tuple[str, object, bool]] = []
    for rule in (ROW, STEPS, SERIAL, GOOD[3]):
        for place in places(rule):
            here = at(rule, place)
            found += [(f"{place} = {odd!r}", changed(rule, place, odd), type(odd) is not type(here)) for odd in ODD]
            if place and isinstance(place[-1], str):
                parent = at(rule, place[:-1])
                without = {key: value for key, value in parent.items() if key != place[-1]}
                found.append((f"{place} removed", changed(rule, place[:-1], without), False))
                found.append((f"{place} added to", changed(rule, place[:-1], {**parent, "more_": 1}), True))
    return found


def test_reader_and_schema_agree_on_every_field(tmp_path: Path) -> None:
    """What is read fits the schema; what is of the wrong type neither is read nor fits."""
    path, disagree = tmp_path / "rules.json", list[str]()
    path.write_text(json.dumps(file(*(rule for _, rule, _ in cases()))))
    for (what, rule, wrong_type), entry in zip(cases(), read_rules(path).entries, strict=True):
        fits, is_read = VALIDATOR.is_valid(file(rule)), not entry.problem or "is the name of" in entry.problem
        if (is_read and not fits) or (wrong_type and (is_read or fits)):
            disagree.append(f"{what}: schema {fits}, reader {entry.problem or 'content'}")
    assert not disagree


def test_the_documentation_names_every_field() -> None:
    text = DOCS.read_text(encoding="utf-8")
    forms = [SCHEMA, *(SCHEMA["$defs"][name] for name in ("row", "steps", "equation"))]
    fields = {name for form in forms for name in form["properties"]}
    assert not [name for name in sorted(fields) if f"`{name}`" not in text]


def blocks(text: str) -> list[dict[str, Any]]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]


def test_every_rule_in_the_documentation_is_read(tmp_path: Path) -> None:
    found = blocks(DOCS.read_text(encoding="utf-8"))
    assert len(found) >= 5
    for data in found:
        whole = data if "rules" in data else file(data)
        VALIDATOR.validate(whole)
        path = tmp_path / "rules.json"
        path.write_text(json.dumps(whole))
        assert not [entry.problem for entry in read_rules(path).malformed]
