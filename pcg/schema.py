"""A check of JSON against a JSON Schema: the part of draft 2020-12 that Shardwright's own schemas use.

A schema is published for editors and other programs; the reader of the file checks by the same text, so that the two
cannot disagree. Numbers are finite, and an integer is one that JSON writes without a point.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

Schema = Mapping[str, Any]

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "string": lambda x: isinstance(x, str),
    "integer": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "number": lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and -math.inf < x < math.inf,
    "boolean": lambda x: isinstance(x, bool),
    "null": lambda x: x is None,
}


@lru_cache(maxsize=8)
def load_schema(package: str, name: str) -> Schema:
    """Return the schema in a file of a package."""
    return json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def problem(value: object, schema: Schema) -> str:
    """Return a value's first problem, with its place: `prediction.step_s: expected …, got …`; "" if there is none."""
    return next(_problems(value, schema, schema, ""), "")


def _problems(value: Any, schema: Schema, root: Schema, where: str) -> Iterator[str]:  # noqa: ANN401 - JSON
    if "$ref" in schema:
        yield from _problems(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, where)
    if "type" in schema:
        allowed = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_TYPES[name](value) for name in allowed):
            yield _told(where, f"{_article(allowed[0])} {' or '.join(allowed)}", value)
            return
    if "const" in schema and not _same(value, schema["const"]):
        yield _told(where, repr(schema["const"]), value)
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        yield _told(where, "one of " + ", ".join(map(repr, schema["enum"])), value)
    tries = [next(_problems(value, one, root, where), "") for one in schema.get("anyOf", ())]
    if tries and all(tries):
        yield tries[-1]
    if isinstance(value, str) and not _pattern(schema.get("pattern", "")).search(value):
        yield _told(where, schema.get("description", f"text like {schema['pattern']}"), value)
    elif _TYPES["number"](value) and value < schema.get("minimum", value):
        yield _told(where, f"at least {schema['minimum']}", value)
    elif _TYPES["number"](value) and value > schema.get("maximum", value):
        yield _told(where, f"at most {schema['maximum']}", value)
    elif isinstance(value, list):
        yield from _in_list(value, schema, root, where)
    elif isinstance(value, dict):
        yield from _in_object(value, schema, root, where)


def _in_list(value: Sequence[Any], schema: Schema, root: Schema, where: str) -> Iterator[str]:
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not least <= len(value) <= most:
        expected = f"{least} entries" if least == most else f"at least {least} entries"
        yield f"{where or 'the file'}: expected {expected}, got {len(value)}"
    first = schema.get("prefixItems", ())
    for number, item in enumerate(value):
        item_schema = first[number] if number < len(first) else schema.get("items", {})
        yield from _problems(item, item_schema, root, f"{where}[{number}]")


def _in_object(value: Mapping[str, Any], schema: Schema, root: Schema, where: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        yield f"{where or 'the file'}: field {missing[0]!r} is missing"
    for name, item in value.items():
        place = f"{where}.{name}" if where else name
        if "propertyNames" in schema:
            yield from _problems(name, schema["propertyNames"], root, f"{where}: name")
        if name in known:
            yield from _problems(item, known[name], root, place)
        elif others is False:
            yield f"{where or 'the file'}: field {name!r} is not known"
        elif others is not True:
            yield from _problems(item, others, root, place)


@lru_cache(maxsize=64)
def _pattern(text: str) -> re.Pattern[str]:
    """Return a pattern as JSON Schema means it: `$` is the end, while in Python it also precedes a last line break."""
    return re.compile(f"{text[:-1]}\\Z" if text.endswith("$") else text)


def _same(value: object, other: object) -> bool:
    """Return whether two JSON values are equal: True is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _told(where: str, expected: str, value: object) -> str:
    shown = ascii(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{where or 'the file'}: expected {expected}, got {shown}"
