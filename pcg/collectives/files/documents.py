"""Documents from elsewhere, read within bounds: XML without entities, JSON without depth, whole numbers in their range.

Errors name the file, the line or the path in it, what was expected, what was found and what to do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar
from xml.parsers import expat

from shardwright.pcg.errors import ScheduleError

Word = TypeVar("Word", bound=str)
MOST_BYTES = 64 << 20
MOST_ELEMENTS = 1 << 20
MOST_DEPTH = 8


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file.

    Raises:
        ScheduleError: it cannot be read, is longer than 64 MiB, or is no UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ScheduleError(f"{path}: cannot read it ({error.strerror}); check the path") from None
    if len(data) > MOST_BYTES:
        raise ScheduleError(f"{path}: expected at most {MOST_BYTES >> 20} MiB, got more; is it a schedule?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: expected text in UTF-8, got other bytes; is it a schedule?") from None


@dataclass(slots=True)
class Element:
    """An element of an XML document: its attributes, its children, and where it stands."""

    tag: str
    attributes: Mapping[str, str]
    source: str
    line: int
    children: list[Element] = field(default_factory=list)

    def error(self, problem: str) -> ScheduleError:
        """Return an error that names the file, the line and the element."""
        return ScheduleError(f"{self.source}, line {self.line}, {self.tag}: {problem}")

    def text(self, name: str, default: str | None = None) -> str:
        """Return an attribute; without a default, it has to be there."""
        value = self.attributes.get(name, default)
        if value is None:
            raise self.error(f"expected the attribute {name!r}, got {_listed(self.attributes)}; add it")
        return value

    def number(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """Return a whole number of a range."""
        text = self.text(name, None if default is None else str(default))
        digits = text[1:] if text.startswith("-") else text
        if digits.isascii() and digits.isdigit() and len(digits) <= 19 and least <= int(text) <= most:
            return int(text)
        raise self.error(f"{name}: expected a whole number from {least} to {most}, got {text[:40]!r}; correct it")

    def only(self, *tags: str) -> Iterator[Element]:
        """Yield the children, which all have one of these tags."""
        for child in self.children:
            if child.tag not in tags:
                raise child.error(f"expected {' or '.join(tags) or 'nothing'} inside of {self.tag}; remove it")
            yield child


def read_xml(text: str, source: str, most_depth: int = MOST_DEPTH) -> Element:
    """Return the root of an XML document whose elements stand in at most `most_depth` levels.

    Raises:
        ScheduleError: no well-formed XML; a document type, an entity or any `&`; more elements or depth than such
            files have.
    """
    if "&" in text:
        line = text.count("\n", 0, text.index("&")) + 1
        raise ScheduleError(f"{source}, line {line}: expected no '&', got one; entities have no place here: remove it")
    reader = _XmlReader(source, most_depth)
    try:
        reader.parser.Parse(text, True)
    except expat.ExpatError as error:
        problem = f"expected XML, got {expat.ErrorString(error.code)}"
        raise ScheduleError(f"{source}, line {error.lineno}: {problem}; is the file whole?") from None
    return reader.root


class _XmlReader:
    def __init__(self, source: str, most_depth: int) -> None:
        self.source, self.most_depth, self.count, self.open = source, most_depth, 0, list[Element]()
        self.root = Element("", {}, source, 0)
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = lambda tag: self.open.pop()
        self.parser.StartDoctypeDeclHandler = self._doctype

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, self.source, self.parser.CurrentLineNumber)
        self.count += 1
        if self.count > MOST_ELEMENTS or len(self.open) >= self.most_depth:
            problem = f"expected at most {MOST_ELEMENTS} elements and {self.most_depth} levels"
            raise element.error(f"{problem}; is it the right file?")
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def _doctype(self, name: str, system: str | None, public: str | None, internal: bool) -> None:
        line = self.parser.CurrentLineNumber
        raise ScheduleError(f"{self.source}, line {line}: expected no document type, got {name[:40]!r}; remove it")


def read_json(text: str, source: str) -> Node:
    """Return the value of a JSON document.

    Raises:
        ScheduleError: no JSON, deep nesting, or a number that is none, as NaN.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except json.JSONDecodeError as error:
        problem = f"expected JSON, got {error.msg.lower()}"
        raise ScheduleError(
            f"{source}, line {error.lineno}, column {error.colno}: {problem}; is the file whole?"
        ) from None
    except (ValueError, RecursionError) as error:
        what = "nesting that is too deep" if isinstance(error, RecursionError) else str(error)
        raise ScheduleError(f"{source}: expected JSON, got {what}; correct it") from None
    return Node(value, source)


def _no_constant(text: str) -> float:
    raise ValueError(f"the number {text}")


def _no_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key[:40]!r} twice in an object")
        seen.add(key)
    return dict(pairs)


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a JSON document, and its path."""

    value: Any
    place: str

    def error(self, problem: str) -> ScheduleError:
        """Return an error that names the place."""
        return ScheduleError(f"{self.place}: {problem}")

    def has(self, key: str) -> bool:
        """Return whether this is an object with that key."""
        return isinstance(self.value, dict) and key in self.value

    def get(self, key: str) -> Node:
        """Return the value of a key, which has to be there."""
        if not isinstance(self.value, dict):
            raise self.error(f"expected an object, got {shown(self.value)}; correct it")
        if key not in self.value:
            raise self.error(f"expected the key {key!r}, got {_listed(self.value)}; add it")
        return Node(self.value[key], f"{self.place}: {key}" if ": " not in self.place else f"{self.place}.{key}")

    def items(self) -> list[Node]:
        """Return the entries of a list."""
        if not isinstance(self.value, list):
            raise self.error(f"expected a list, got {shown(self.value)}; correct it")
        return [Node(entry, f"{self.place}[{index}]") for index, entry in enumerate(self.value)]

    def fields(self) -> dict[str, Node]:
        """Return the keys and values of an object."""
        if not isinstance(self.value, dict):
            raise self.error(f"expected an object, got {shown(self.value)}; correct it")
        return {key: self.get(key) for key in self.value}

    def known(self, keys: Collection[str]) -> Node:
        """Return this object, which has none but these keys."""
        for key, entry in self.fields().items():
            if key not in keys:
                raise entry.error(f"expected one of {', '.join(keys)}; remove it or correct it")
        return self

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.error(f"expected text, got {shown(self.value)}; correct it")
        return self.value

    def one_of(self, words: Collection[Word]) -> Word:
        """Return a string that is one of `words`."""
        chosen = next((word for word in words if word == self.text()), None)
        if chosen is None:
            raise self.error(f"expected one of {', '.join(words)}, got {shown(self.value)}; choose one of them")
        return chosen

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.error(f"expected true or false, got {shown(self.value)}; correct it")
        return self.value

    def number(self, least: int, most: int) -> int:
        """Return a whole number of a range."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            problem = f"expected a whole number from {least} to {most}, got {shown(value)}; correct it"
            raise self.error(problem)
        return value

    def real(self) -> float:
        """Return a finite number of at least 0."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e30:
            raise self.error(f"expected a number of at least 0, got {shown(value)}; correct it")
        return value

    def fraction(self) -> Fraction:
        """Return an exact number of at least 0: a whole one, or a text such as "3/8"."""
        text = str(self.value) if isinstance(self.value, int) and not isinstance(self.value, bool) else self.value
        if isinstance(text, str) and len(text) <= 200 and re.fullmatch(r"[0-9]+(/0*[1-9][0-9]*)?", text, re.ASCII):
            return Fraction(text)
        raise self.error(f'expected a whole number or a fraction such as "3/8", got {shown(self.value)}; correct it')

    def numbers(self, least: int, most: int) -> tuple[int, ...]:
        """Return a list of whole numbers of a range."""
        return tuple(entry.number(least, most) for entry in self.items())


def shown(value: object) -> str:
    """Return a value for an error, cut short."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _listed(keys: Mapping[str, object] | Sequence[str]) -> str:
    return shown(", ".join(list(keys)[:12]) or "none")
