"""Operators without a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.pcg.aten.registry import Ref
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.node import OPAQUE


def opaque(
    b: GraphBuilder,
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[tuple[tuple[int, ...], str] | None],
) -> tuple[str | None, ...]:
    """The operator as it is: its argument template has ("$", i) where operand i goes. One node per result."""
    operands: list[str] = []

    def template(value: Any) -> Any:
        if isinstance(value, Ref):
            operands.append(value)
            return ("$", len(operands) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(template(v) for v in value)
        return value if isinstance(value, (int, float, bool, str, type(None))) else ("torch", str(value))

    packed = template(args)
    named = tuple((key, template(value)) for key, value in sorted(kwargs.items()))

    def node(i: int, shape: tuple[int, ...], dtype: str) -> str:
        return b.op(OPAQUE, *operands, target=target, args=packed, kwargs=named, result=i, shape=shape, dtype=dtype)

    return tuple(None if result is None else node(i, *result) for i, result in enumerate(results))
