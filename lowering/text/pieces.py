"""Pieces of the emitted text: identifiers, comments, numbers, attributes, operators without a row.

All text of a plan file reaches the program through one of these functions, and none lets such text become code.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from shardwright.pcg.attrs import integer
from shardwright.pcg.errors import GraphError, printable
from shardwright.pcg.foreign import Call
from shardwright.pcg.graph import Node
from shardwright.pcg.optable import Attr

_WORD = re.compile(r"[a-z_]\w*", re.ASCII | re.IGNORECASE)
_OPERATOR = re.compile(r"\w+\.\w+\.\w+", re.ASCII)
_OF_TORCH = re.compile(r"torch\.\w+", re.ASCII)


def identifiers(names: list[str], reserved: Collection[str]) -> dict[str, str]:
    """Return a readable and unique Python identifier for every name."""
    taken, identifier_of = set(reserved), {}
    for name, text in zip(names, identifiers_of(names), strict=True):
        while text in taken:
            text += "_"
        taken.add(text)
        identifier_of[name] = text
    return identifier_of


def identifiers_of(names: Iterable[str]) -> list[str]:
    """Return each name as an identifier, perhaps not unique; in ASCII, as Python takes some other letters for equal."""
    texts = [re.sub(r"\W", "_", name, flags=re.ASCII) for name in names]
    texts = [text if text.isidentifier() else f"t_{text}" for text in texts]
    return [f"{text}_" if keyword.iskeyword(text) else text for text in texts]


def local_identifiers(wanted: Mapping[str, str], reserved: Collection[str]) -> dict[str, str]:
    """Return identifiers for names by their wanted texts, numbered within the function instead of as in the graph.

    So functions of equal blocks have equal texts, wherever in the model their nodes were numbered.
    """
    bases = {name: re.sub(r"_\d+x?(?=[._ ]|$)| \d+$", "", text) for name, text in wanted.items()}
    taken, identifier_of = set(reserved), dict[str, str]()
    for name, base in zip(wanted, identifiers_of(bases.values()), strict=True):
        text, number = base, 1
        while text in taken:
            text, number = f"{base}_{number}", number + 1
        taken.add(text)
        identifier_of[name] = text
    return identifier_of


def indexed(text: str) -> tuple[str, int | None]:
    """Split an expression that ends in `[0]`, `[1]`, … into the call and the index, which is None if there is none."""
    match = re.fullmatch(r"(.*\))\[(\d+)\]", text)
    return (match[1], int(match[2])) if match else (text, None)


def literal(value: object) -> str:
    """Return a number as Python source, infinities and NaN included."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def words(text: str) -> str:
    """Return text for a comment or a docstring: one line, in which nothing ends the docstring or begins an escape."""
    return printable(text.replace("\\", "\\\\").replace('"', "'"), "")


def attribute(value: Attr) -> Attr:
    """Return an attribute that `str.format` may print: infinities would become bare names, and text could be any code.

    Raises `GraphError` for text that is not a plain word (a dtype is one).
    """
    if isinstance(value, str):
        return _word(value, _WORD)
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    return literal(value) if isinstance(value, float) else value


def opaque_call(node: Node, operands: list[str]) -> str:
    """Return the call of an operator without a row, as captured. Raises `GraphError` for what capture cannot write."""
    import torch

    try:
        path, result = str(node.attr("target")), integer(dict(node.attrs), "result")
        returns = _operator(path)._schema.returns
        args = [_argument(value, operands) for value in _entries(node.attr("args"))]
        for pair in _entries(node.attr("kwargs")):
            name, value = _entries(pair)
            args.append(f"{_word(name, _WORD)}={_argument(value, operands)}")
        is_list = bool(returns) and isinstance(returns[0].type, torch.ListType)
        if result < 0 or (result >= len(returns) and not is_list):
            raise GraphError(f"attribute 'result' is {result}, and {path} gives {len(returns)} values")
    except (GraphError, ValueError) as error:
        raise GraphError(f"{node}: {error}; make the plan again") from error
    call = f"torch.ops.{path}({', '.join(args)})"
    return f"{call}[{result}]" if len(returns) > 1 or is_list else call


def foreign_call(node: Node, operands: list[str]) -> str:
    """Return the call of a part of the model that runs as it is."""
    call, result = Call.of(node), integer(dict(node.attrs), "result")
    return f"foreign.call({', '.join([repr(call.name), repr(call.number), *operands])})[{result}]"


def _operator(path: str) -> Any:  # noqa: ANN401 - torch's own type
    import torch

    from shardwright.lowering import private

    op: Any = torch.ops
    for part in _word(path, _OPERATOR).split("."):
        op = getattr(op, part, None)
    if not isinstance(op, private.OpOverload):
        raise GraphError(f"torch has no operator {path!r} here; import what registers it, as the model does")
    return op


def _argument(value: Attr, operands: list[str]) -> str:
    """Write an argument of a template (`pcg.aten.lift`): an operand, a dtype or device of torch, a number or text."""
    match value:
        case ("$", int(position)) if 0 <= position < len(operands):
            return operands[position]
        case ("$", _):
            raise GraphError(f"an argument is operand {value[1]!r} of {len(operands)}")
        case ("torch", str(text)):
            return _word(text, _OF_TORCH) if text.startswith("torch.") else "device"
        case tuple():
            return "[" + ", ".join(_argument(item, operands) for item in value) + "]"
        case _:
            return literal(value)


def _entries(value: Attr) -> tuple[Attr, ...]:
    if not isinstance(value, tuple):
        raise GraphError(f"expected a tuple of arguments, got {value!r}")
    return value


def _word(text: Attr, pattern: re.Pattern[str]) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise GraphError(f"{text!r} is no name that torch has")
    return text
