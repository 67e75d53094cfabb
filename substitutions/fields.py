"""Checks of the JSON form of rules: every mistake is a `RuleError` that names the rule and the field.

    rule 'fuse': field 'left[0]': expected text, got 3

A rule is written by people and by other programs; nothing about it is taken for granted. Limits are far above what a
rule needs, and keep a broken file from taking the machine down.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from shardwright.pcg.errors import RuleError

T = TypeVar("T")
MAX_TEXT = 8_000
"""The most characters of one field."""
MAX_ITEMS = 100
"""The most entries of one list or object: roots, variables, steps, conditions."""


@contextmanager
def located(place: str) -> Generator[None]:
    """Put the rule, or the rule and the field, before the message of an error."""
    try:
        yield
    except RuleError as error:
        text = str(error)
        raise RuleError(text if text.startswith(place) else f"{place}: {text}") from None


def shown(value: object) -> str:
    """Return a value as errors show it."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of too many digits
        text = type(value).__name__
    return short(text, 60)


def short(value: object, most: int = 80) -> str:
    """Return a value as text of at most `most` characters."""
    text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def record(data: object, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return `data` as an object, which has every required field and no unknown one."""
    if not isinstance(data, Mapping):
        raise RuleError(f"expected an object with the fields {_names(required)}, got {shown(data)}")
    missing = [key for key in required if key not in data]
    if missing:
        raise RuleError(f"field {missing[0]!r} is missing")
    unknown = [key for key in data if key not in required and key not in optional]
    if unknown:
        raise RuleError(f"unknown field {shown(unknown[0])}; expected {_names([*required, *optional])}")
    return dict(data)


def text(data: Mapping[str, Any], key: str) -> str:
    """Return a field that is text."""
    return _text(data[key], key)


def one(data: Mapping[str, Any], key: str, read: Callable[[str], T]) -> T:
    """Return a field that is text, read; an error names the field."""
    return _read(data[key], key, read)


def texts(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a field that is a list of text; () where it is left out."""
    return each(data, key, str)


def each(data: Mapping[str, Any], key: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """Return a field that is a list of text, every item read; an error names the item."""
    return _each(data.get(key, []), key, read)


def text_map(data: Mapping[str, Any], key: str, read: Callable[[str], T]) -> dict[str, T]:
    """Return a field that is an object of text, which may be empty, every value read."""
    items = _object(data[key], key).items()
    return {name: _read(item, f"{key}.{name}", read, empty=True) for name, item in items}


def texts_map(data: Mapping[str, Any], key: str, read: Callable[[str], T]) -> dict[str, tuple[T, ...]]:
    """Return a field that is an object of lists of text, every item read; {} where it is left out."""
    return {name: _each(items, f"{key}.{name}", read) for name, items in _object(data.get(key, {}), key).items()}


def digest(data: Mapping[str, Any]) -> str:
    """Return the name of a rule: SHA-256 over its JSON form, as we write it, without its own name.

    Proofs are kept under it, so it is not shortened: two rules of one short hash can be made, one of them true.
    """
    named = {key: value for key, value in data.items() if key != "name"}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def flag(data: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return a field that is true or false."""
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise RuleError(f"field {key!r}: expected true or false, got {shown(value)}")
    return value


def name_of(data: object, key: str = "name") -> str:
    """Return the name of a rule for errors; "?" if the data has none."""
    value = data.get(key) if isinstance(data, Mapping) else None
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_TEXT else "?"


def _each(value: object, where: str, read: Callable[[str], T]) -> tuple[T, ...]:
    if not isinstance(value, (list, tuple)):
        raise RuleError(f"field {where!r}: expected a list of text, got {shown(value)}")
    return tuple(_read(item, f"{where}[{i}]", read) for i, item in enumerate(_few(value, where)))


def _read(value: object, where: str, read: Callable[[str], T], empty: bool = False) -> T:
    text = _text(value, where, empty)
    with located(f"field {where!r}"):
        return read(text)


def _text(value: object, where: str, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise RuleError(f"field {where!r}: expected text, got {shown(value)}")
    if not value.strip() and not empty:
        raise RuleError(f"field {where!r}: expected text, got none")
    if len(value) > MAX_TEXT:
        raise RuleError(f"field {where!r}: {len(value)} characters; at most {MAX_TEXT} are read")
    bad = next((c for c in value if not c.isprintable()), None)
    if bad is not None:
        raise RuleError(f"field {where!r}: the character {bad!r} does not belong in a rule")
    return value


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RuleError(f"field {where!r}: expected an object, got {shown(value)}")
    odd = [key for key in _few(value, where) if not isinstance(key, str) or not key.isidentifier()]
    if odd:
        raise RuleError(f"field {where!r}: {shown(odd[0])} is not a name")
    return dict(value)


def _few(value: Collection[Any], where: str) -> Collection[Any]:
    if len(value) > MAX_ITEMS:
        raise RuleError(f"field {where!r}: {len(value)} entries; at most {MAX_ITEMS} are read")
    return value


def _names(keys: Collection[str]) -> str:
    return ", ".join(f"'{key}'" for key in keys)
