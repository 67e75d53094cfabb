"""Pieces of the emitted text: identifiers, numbers, attributes, operators without a row."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from shardwright.pcg.graph import Node
from shardwright.pcg.optable import Attr


def identifiers(names: list[str], reserved: Collection[str]) -> dict[str, str]:
    """A Python identifier for every node, readable and unique."""
    taken, found = set(reserved), {}
    for name, text in zip(names, identifiers_of(names), strict=True):
        while text in taken or keyword.iskeyword(text):
            text += "_"
        taken.add(text)
        found[name] = text
    return found


def identifiers_of(names: Iterable[str]) -> list[str]:
    """Each name as an identifier, which others may have too."""
    texts = [re.sub(r"\W", "_", name) for name in names]
    return [text if text.isidentifier() else f"t_{text}" for text in texts]


def local_identifiers(wanted: Mapping[str, str], reserved: Collection[str]) -> dict[str, str]:
    """Identifiers for names by what they are to be called, with numbers of their own in place of those of the graph.

    So functions of equal blocks have equal texts, wherever in the model their nodes were numbered.
    """
    bases = {name: re.sub(r"_\d+x?(?=[._ ]|$)| \d+$", "", text) for name, text in wanted.items()}
    taken, found = set(reserved), dict[str, str]()
    for name, base in zip(wanted, identifiers_of(bases.values()), strict=True):
        text, number = base, 1
        while text in taken or keyword.iskeyword(text):
            text, number = f"{base}_{number}", number + 1
        taken.add(text)
        found[name] = text
    return found


def indexed(text: str) -> tuple[str, int | None]:
    """An expression that ends in `[0]` or `[1]`, …, taken apart."""
    match = re.fullmatch(r"(.*\))\[(\d+)\]", text)
    return (match[1], int(match[2])) if match else (text, None)


def literal(value: object) -> str:
    """A number as Python source, infinities and NaN included."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def attribute(value: Attr) -> Attr:
    """An attribute as `str.format` may print it: infinities would come out as names."""
    return literal(value) if isinstance(value, float) else value


def opaque_call(node: Node, operands: list[str]) -> str:
    """An operator without a row, called as it was captured."""
    import torch

    attrs = dict(node.attrs)
    path = str(attrs["target"])
    op: Any = torch.ops
    for part in path.split("."):
        op = getattr(op, part)

    def text(value: Attr) -> str:
        if isinstance(value, tuple) and len(value) == 2 and value[0] == "$":
            return operands[value[1]]
        if isinstance(value, tuple) and len(value) == 2 and value[0] == "torch":
            return str(value[1]) if str(value[1]).startswith("torch.") else "device"
        if isinstance(value, tuple):
            return "[" + ", ".join(map(text, value)) + "]"
        return literal(value)

    args = [text(v) for v in attrs["args"]] + [f"{k}={text(v)}" for k, v in attrs["kwargs"]]  # type: ignore[union-attr,misc]
    call = f"torch.ops.{path}({', '.join(args)})"
    returns = op._schema.returns
    several = len(returns) > 1 or isinstance(returns[0].type, torch.ListType)
    return f"{call}[{attrs['result']}]" if several else call
