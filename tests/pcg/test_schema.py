"""The reader of JSON Schemas agrees with the reference implementation on the schema that it is for, and is stricter."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import jsonschema
import pytest

from shardwright.pcg.schema import load_schema, problem
from tests.each import each
from tests.shardwright.test_untrusted import change, good

SCHEMA = load_schema("shardwright.search", "plan.schema.json")
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_one_that_the_reader_knows_all_of() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    known = {
        "$schema", "$defs", "$ref", "title", "description", "type", "required", "properties", "additionalProperties",
        "propertyNames", "items", "prefixItems", "minItems", "maxItems", "const", "enum", "anyOf", "minimum", "maximum",
        "pattern",
    }  # fmt: skip

    def words(schema: Any) -> set[str]:
        found = set[str]()
        for key, value in schema.items() if isinstance(schema, dict) else ():
            inner = value.values() if key in ("properties", "$defs") else value if isinstance(value, list) else [value]
            found |= {key}.union(*(words(one) for one in inner if key not in ("enum", "const")))
        return found

    assert words(SCHEMA) <= known


def ordinary(data: Any) -> Any:
    """Without what the reference lets pass: 2.0 as an integer, NaN, and `$` before a line's end."""
    if isinstance(data, dict):
        return {str(ordinary(key)): ordinary(value) for key, value in data.items()}
    if isinstance(data, list):
        return [ordinary(value) for value in data]
    if isinstance(data, float):
        return None if not math.isfinite(data) else data if data % 1 else round(data)
    return data.rstrip("\n") if isinstance(data, str) else data


@pytest.mark.parametrize("plan", [0, 1])
def test_it_agrees_with_the_reference(plan: int) -> None:
    draw, verdicts = random.Random(plan), list[bool]()
    base = good()[plan][1]
    assert problem(base, SCHEMA) == ""
    base = ordinary({**base, "graph": base["graph"][:3], "alternatives": base["alternatives"][:1], "cluster": {}})
    for _ in range(400):
        data = copy.deepcopy(base)
        change(data, draw)
        data = ordinary(data)
        verdicts.append(problem(data, SCHEMA) == "")
        assert verdicts[-1] == VALIDATOR.is_valid(data), (problem(data, SCHEMA), json.dumps(data))
    assert 20 < sum(verdicts) < 380


@each(
    ("value", "schema", "message"),
    [
        (math.nan, {"type": "number"}, "the file: expected a number, got nan"),
        (math.inf, {"type": "number"}, "the file: expected a number, got inf"),
        (2.0, {"type": "integer"}, "the file: expected an integer, got 2.0"),
        (True, {"type": ["integer", "null"]}, "the file: expected an integer or null, got True"),
        (True, {"enum": [1, "x"]}, "the file: expected one of 1, 'x', got True"),
        ("a\n", {"pattern": "^a$"}, "the file: expected text like ^a$, got 'a\\n'"),
        ({"a": [1, -1]}, {"properties": {"a": {"items": {"minimum": 0}}}}, "a[1]: expected at least 0, got -1"),
        ({"a": 1}, {"properties": {"a": {"maximum": 0}}}, "a: expected at most 0, got 1"),
        ([1], {"minItems": 2, "maxItems": 2}, "the file: expected 2 entries, got 1"),
        ([], {"minItems": 2}, "the file: expected at least 2 entries, got 0"),
        ({"a": {}}, {"properties": {"a": {"required": ["b"]}}}, "a: field 'b' is missing"),
        ({"b": 1}, {"additionalProperties": False}, "the file: field 'b' is not known"),
        ("x" * 99, {"const": "y"}, f"the file: expected 'y', got '{'x' * 56}..."),
        ("\x1b", {"const": "y"}, "the file: expected 'y', got '\\x1b'"),
    ],
)
def test_messages(value: object, schema: dict[str, Any], message: str) -> None:
    assert problem(value, schema) == message
