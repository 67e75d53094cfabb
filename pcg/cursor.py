"""A place in one line of text: the parser of graphs reads with it, and errors point at it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TypeVar

from shardwright.pcg.errors import GraphError

T = TypeVar("T")

NAME = re.compile(r"[\w.]+")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_BLANKS = (" ", "\t")


class Cursor:
    """A reader of one line from left to right, which skips blanks after each token.

    It raises a `GraphError` with the line, a caret and the expected text if something else stands there.
    """

    def __init__(self, line: str, number: int) -> None:
        self.line, self.number, self.at = line.rstrip("\r"), number, 0
        self._skip()

    def problem(self, message: str, at: int | None = None) -> GraphError:
        """Return the error to raise, pointing at `at` or here."""
        caret = " " * (self.at if at is None else at) + "^"
        return GraphError(f"line {self.number}: {message}\n  {self.line}\n  {caret}")

    def expected(self, what: str, at: int | None = None) -> GraphError:
        """Return the error that says what should stand here."""
        return self.problem(f"expected {what}", at)

    def _skip(self) -> None:
        while self.line.startswith(_BLANKS, self.at):
            self.at += 1

    def at_end(self) -> bool:
        """Return whether nothing but a comment follows."""
        return self.at == len(self.line) or self.line[self.at] == "#"

    def sees(self, *literals: str) -> bool:
        """Return whether one of `literals` stands here."""
        return self.line.startswith(literals, self.at)

    def take(self, literal: str) -> bool:
        """Read `literal` if it stands here."""
        if not self.line.startswith(literal, self.at):
            return False
        self.at += len(literal)
        self._skip()
        return True

    def expect(self, literal: str, what: str = "") -> None:
        """Read `literal`, which must stand here."""
        if not self.take(literal):
            raise self.expected(what or repr(literal))

    def expect_end(self, what: str) -> None:
        """Require that nothing but a comment follows."""
        if not self.at_end():
            raise self.expected(what)

    def pattern(self, pattern: re.Pattern[str], what: str) -> str:
        """Read the text that `pattern` matches here."""
        match = pattern.match(self.line, self.at)
        if not match:
            raise self.expected(what)
        self.at = match.end()
        self._skip()
        return match[0]

    def name(self, what: str, bare: re.Pattern[str] = NAME) -> str:
        """Read a bare or quoted name."""
        return self.string(what) if self.sees("'", '"') else self.pattern(bare, what)

    def string(self, what: str) -> str:
        """Read a quoted string with Python's escapes."""
        at = self.at
        text = self.pattern(_STRING, f"{what}: a quoted string that ends on this line")
        if "\\" not in text and text.isprintable():
            return text[1:-1]
        try:
            return str(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            raise self.expected(f"{what}: a quoted string with Python's escapes", at) from None

    def items(self, close: str, item: Callable[[], T], what: str) -> list[T]:
        """Read items separated by commas, up to and with `close`."""
        items: list[T] = []
        while not self.take(close):
            if items:
                self.expect(",", f"',' or {close!r}")
            if self.at_end():
                raise self.expected(f"{what} or {close!r}")
            items.append(item())
        return items
