"""Expressions over sizes: the attributes and guards of a rule.

A fixed, small language in Python's notation, kept as text and parsed here; nothing of it is ever executed as Python:

    integers, names, True and False      start, o, 2
    + - * // %                           o // 3, of numbers
    tuples, with splices                 (*b, 3, o)
    == != < <= > >=                      0 <= start < stop (guards only)
    len(b)  iota(n)  compose(p, q)       a tuple's length, (0, …, n-1), (p[q[0]], p[q[1]], …)
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardwright.pcg.errors import RuleError

ExpressionValue = Any
Env = Mapping[str, ExpressionValue]

_BINARY: dict[type[ast.operator], Callable[[ExpressionValue, ExpressionValue], ExpressionValue]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[ExpressionValue, ExpressionValue], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., ExpressionValue]] = {
    "len": len,
    "iota": lambda n: tuple(range(_rank(n))),
    "compose": lambda p, q: tuple(p[i] for i in q),
}
RESERVED = frozenset(_FUNCTIONS)
_MAX_RANK = 64


def _rank(n: ExpressionValue) -> int:
    """Return a number of dimensions, to which `iota` counts."""
    if not isinstance(n, int) or n > _MAX_RANK:
        raise ValueError(f"iota({n}): no tensor has so many dimensions")
    return n


def _arithmetic(op: ast.operator, left: ExpressionValue, right: ExpressionValue) -> ExpressionValue:
    """Compute with numbers only: Python would repeat tuples and format text."""
    for value in (left, right):
        if isinstance(value, (tuple, str)):
            raise TypeError(f"{value!r} is not a number")
    return _BINARY[type(op)](left, right)


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression; equal texts are equal expressions."""

    text: str

    @property
    def tree(self) -> ast.expr:
        return _parse(self.text)

    @property
    def name(self) -> str | None:
        """The name, where the expression is nothing but a name."""
        return self.tree.id if isinstance(self.tree, ast.Name) else None

    @property
    def names(self) -> frozenset[str]:
        """The names that must be known to evaluate it."""
        return _names(self.text)

    @property
    def binds(self) -> frozenset[str]:
        """The names that a value of the expression determines: itself a name, or the names in a tuple."""
        items = self.tree.elts if isinstance(self.tree, ast.Tuple) else [self.tree]
        return frozenset(name for name, _ in _slots(items) if name)

    @property
    def scalars(self) -> frozenset[str]:
        """The names among `binds` that are no tuples: (*b, 3, o) has o."""
        items = self.tree.elts if isinstance(self.tree, ast.Tuple) else [self.tree]
        return frozenset(name for name, star in _slots(items) if name and not star)

    def read(self, value: ExpressionValue) -> dict[str, ExpressionValue]:
        """Return the values that a value of the expression gives its names: `(m, h, d)` of (4, 2, 3) gives m, h and d.

        Nothing is checked.
        """
        if not isinstance(self.tree, ast.Tuple):
            return {self.tree.id: value} if isinstance(self.tree, ast.Name) else {}
        slots = list(_slots(self.tree.elts))
        starred = [i for i, (_, star) in enumerate(slots) if star]
        if not isinstance(value, tuple) or len(starred) > 1 or (not starred and len(value) != len(slots)):
            return {}
        at, spare = (starred[0] if starred else len(slots)), len(value) - len(slots) + 1
        if spare < 0:
            return {}
        parts = [*value[:at], *([value[at : at + spare]] if starred else []), *value[at + spare if starred else at :]]
        return {name: part for (name, _), part in zip(slots, parts, strict=True) if name}

    def evaluate(self, env: Env) -> ExpressionValue:
        """Return the value under these names. Raises `RuleError` for a name that is not bound."""
        try:
            return _evaluate(self.tree, env)
        except (TypeError, ValueError, ArithmeticError, IndexError) as error:
            raise RuleError(f"expression {self.text!r} has no value for {dict(env)}: {error}") from None

    def __str__(self) -> str:
        return self.text


def _slots(items: Sequence[ast.expr]) -> Iterator[tuple[str, bool]]:
    """Yield each item's name, "" where it is no bare name, and whether the item is a splice."""
    for item in items:
        inner = item.value if isinstance(item, ast.Starred) else item
        yield inner.id if isinstance(inner, ast.Name) else "", isinstance(item, ast.Starred)


@lru_cache(maxsize=4096)
def _names(text: str) -> frozenset[str]:
    names = {node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name)}
    return frozenset(names - set(_FUNCTIONS))


@lru_cache(maxsize=4096)
def expression(text: str) -> Expression:
    """Read an expression. Raises a `RuleError` that says what is not part of the language."""
    return Expression(ast.unparse(_parse(text)))


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    try:
        tree = ast.parse(text, mode="eval").body
        ast.unparse(tree)
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else error
        raise RuleError(f"expression {text!r} cannot be read: {why}") from None
    except (RecursionError, MemoryError):
        raise RuleError(f"expression {text[:60]!r}... cannot be read: it is nested too deeply") from None
    check(tree, text)
    return tree


def check(tree: ast.expr, text: str) -> None:
    """Raise a `RuleError` naming the first construct that is not part of the language."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords:
                raise RuleError(
                    f"expression {text!r}: calls {ast.unparse(node)}; only {sorted(_FUNCTIONS)} may be called"
                )
        elif (
            isinstance(node, ast.Constant) and not isinstance(node.value, (int, str, float)) and node.value is not None
        ):
            raise RuleError(f"expression {text!r}: the constant {node.value!r} is not allowed")
        elif not isinstance(node, _ALLOWED):
            raise RuleError(f"expression {text!r}: {type(node).__name__} is not part of the language")


_ALLOWED = (
    ast.Name, ast.Constant, ast.Tuple, ast.Starred, ast.BinOp, ast.UnaryOp, ast.USub, ast.Compare, ast.expr_context,
    *_BINARY, *_COMPARE,
)  # fmt: skip


def _evaluate(tree: ast.expr, env: Env) -> ExpressionValue:
    match tree:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            if name not in env:
                raise RuleError(f"name {name!r} is not bound; bound are {sorted(env)}")
            return env[name]
        case ast.Tuple(elts=items):
            return tuple(_items(items, env))
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, env)
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(op, _evaluate(left, env), _evaluate(right, env))
        case ast.Compare(left=left, ops=ops, comparators=rest):
            values = [_evaluate(part, env) for part in (left, *rest)]
            return all(_COMPARE[type(op)](values[i], values[i + 1]) for i, op in enumerate(ops))
        case ast.Call(func=ast.Name(id=function), args=args):
            return _FUNCTIONS[function](*(_evaluate(arg, env) for arg in args))
        case _:
            raise RuleError(f"{ast.unparse(tree)} cannot be evaluated here")


def _items(items: list[ast.expr], env: Env) -> Iterator[ExpressionValue]:
    for item in items:
        if isinstance(item, ast.Starred):
            yield from _evaluate(item.value, env)
        else:
            yield _evaluate(item, env)
