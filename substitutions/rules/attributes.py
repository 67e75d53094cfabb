"""The attributes of rows as rules write them: the type of each, and values that stand for a free one.

Types are read from the annotations of the row's semantics; rows without annotations share a few attributes.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.expressions import Expression

_INTEGERS = "Sequence[int]"
_COMMON: Mapping[str, str] = {"dim": "int", "dims": _INTEGERS, "keepdim": "bool", "shape": _INTEGERS}
"""The attributes of rows whose semantics are a function of NumPy."""
_SAME: Mapping[str, str] = {"Shape": _INTEGERS, "tuple[int, ...]": _INTEGERS}
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "bool": (False, True),
    "int": tuple(range(9)),
    "float": (0.25, 0.5, 2.0),
    "str": ("none", "tanh", "float64", "int64"),
    _INTEGERS: ((1, 1), (0, 0), (2, 1), (1, 2)),
    "None": (None,),
}
"""Small values of every type; those that a row does not take make no instance."""
CONSTANTS: Mapping[str, Any] = {
    "eps": 1e-5, "scale": 0.5, "smoothing": 0.25, "ignore": -100, "pad": None,
    "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1),
}  # fmt: skip
"""Attributes that a rule leaves free, and a value of each."""
_WORDS: Mapping[str, str] = {
    "bool": "True or False", "int": "an integer", "float": "a number", "str": "text",
    _INTEGERS: "a tuple of integers", "None": "None",
}  # fmt: skip


@lru_cache(maxsize=256)
def semantics(op: str) -> inspect.Signature | None:
    """Return the operands and attributes of the row's semantics; None where it has operands alone."""
    function = ROWS[op].numpy
    if not inspect.isfunction(function) and isinstance(ROWS[op].factors, str):
        return None  # a universal function of NumPy, whose own options are not attributes
    return inspect.signature(function)


@lru_cache(maxsize=1024)
def types(op: str, key: str) -> tuple[str, ...]:
    """Return the types that an attribute of a row may have; () where nothing states them, as for parallel operators."""
    meaning = semantics(op) if op in ROWS else None
    given = meaning.parameters.get(key) if meaning is not None else None
    said = str(given.annotation).strip("'\"") if given is not None and given.annotation is not given.empty else ""
    said = said or (_COMMON.get(key, "") if op in ROWS else "")
    parts = tuple(_SAME.get(part, part) for part in said.split(" | "))
    return parts if all(part in _VALUES for part in parts) else ()


def values(op: str, key: str) -> tuple[Any, ...]:
    """Return values for an attribute that a rule leaves free; small ones if it is optional, to index any table."""
    kinds = types(op, key)
    few = 2 if "None" in kinds else None
    return tuple(value for kind in kinds for value in _VALUES[kind][:few]) or _VALUES["int"]


def check_type(op: str, key: str, value: Expression) -> None:
    """Raise a `RuleError` for a value that no attribute of its type can have."""
    wanted, got = types(op, key), _type(value.tree)
    if wanted and got and got not in wanted and not (got == "int" and "float" in wanted):
        raise RuleError(f"expected {' or '.join(_WORDS[kind] for kind in wanted)}, got {value}")


def _type(tree: ast.expr) -> str:
    """Return the type of an expression; "" where names decide it."""
    match tree:
        case ast.Constant(value=value):
            return "None" if value is None else type(value).__name__
        case ast.UnaryOp(operand=operand):
            return _type(operand)
        case ast.BinOp(left=left, right=right):
            return "float" if "float" in (_type(left), _type(right)) else "int"
        case ast.Tuple(elts=items):
            odd = next((kind for kind in map(_type, items) if kind not in ("", "int")), None)
            return _INTEGERS if odd is None else f"a tuple with {odd}"
        case ast.Call(func=ast.Name(id="len")):
            return "int"
        case ast.Call():
            return _INTEGERS
        case _:
            return ""
