"""Lifting: each ATen operator becomes rows of the op table, or an opaque operator where no handler covers it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from shardwright.pcg.aten.complexes import lift_complex
from shardwright.pcg.aten.pairs import Pair, Value
from shardwright.pcg.aten.registry import HANDLERS, Handler, NotCovered, Ref
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError
from shardwright.pcg.node import OPAQUE, may_draw
from shardwright.pcg.types import COMPLEX, ITEM_BYTES, is_float

ResultType = tuple[tuple[int, ...], str]
# Where a tensor lies and how it is stored is no part of a graph.
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_signature = cache(inspect.signature)


def lift(
    b: GraphBuilder,
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    types: Sequence[ResultType | None],
    read: Collection[int],
) -> tuple[Value | None, ...]:
    """Append what `target`, such as "aten.add.Tensor", computes, and return one node name per result.

    Tensors among the arguments are `Ref`s, complex ones `Pair`s. `types` are shapes and dtypes that torch gives the
    results, `read` the indices of those that something reads; others may be None. Raises `GraphError` where a row gives
    another shape, and for complex numbers in operators that have no rows.
    """
    if any(dtype in COMPLEX for _, dtype in filter(None, types)) or _has_pairs((args, kwargs)):
        given = {key: value for key, value in kwargs.items() if key not in _PLACEMENT}
        return tuple(
            name if name is None or kind is None else _checked_parts(b, name, kind)
            for name, kind in zip(lift_complex(b, target, args, given), types, strict=True)
        )
    for _, dtype in filter(None, types):
        if dtype not in ITEM_BYTES:
            raise GraphError(f"a result is {dtype}; expected one of {', '.join(ITEM_BYTES)}: compute with real numbers")
    names = _by_handler(b, target, args, kwargs)
    if names is None or any(names[i] is None for i in read):
        names = _opaque(b, target, args, kwargs, types)
    return tuple(
        name if name is None or kind is None else _checked(b, name, kind)
        for name, kind in zip(names, types, strict=True)
    )


def _has_pairs(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_pairs, value))
    return any(map(_has_pairs, value.values())) if isinstance(value, Mapping) else isinstance(value, Pair)


def _checked_parts(b: GraphBuilder, value: Value, kind: ResultType) -> Value:
    shape, dtype = kind
    if isinstance(value, Pair) != (dtype in COMPLEX):
        raise GraphError(f"expected {dtype}, its row gives {'complex' if isinstance(value, Pair) else 'real'} numbers")
    if isinstance(value, Pair):
        checked = Pair(*(_checked(b, part, (shape, COMPLEX[dtype])) for part in (value.real, value.imag)))
        return value if checked == value else checked
    return _checked(b, value, kind)


def find_handler(target: str) -> Handler | None:
    """Return the handler of an operator, or None. A handler of one overload precedes that of all overloads."""
    namespace, name, overload = target.split(".") if target.count(".") == 2 else ("", target, "")
    if namespace != "aten":
        return HANDLERS.get(f"{namespace}::{name}")
    return HANDLERS.get(f"{name}.{overload}") or HANDLERS.get(name)


def _by_handler(
    b: GraphBuilder, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str | None, ...] | None:
    """Return the results of the handler, or None where the operator has no handler or its arguments are not covered."""
    if (handler := find_handler(target)) is None:
        return None
    try:
        bound = _signature(handler).bind(b, *args, **{k: v for k, v in kwargs.items() if k not in _PLACEMENT})
    except TypeError:
        return None
    try:
        lifted = handler(*bound.args, **bound.kwargs)
    except NotCovered:
        return None
    return lifted if isinstance(lifted, tuple) else (lifted,)


def _opaque(
    b: GraphBuilder,
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    types: Sequence[ResultType | None],
) -> tuple[str | None, ...]:
    """Append an operator without a row, one node per result. In its argument template ("$", i) is operand i.

    The results of a call that may draw share the number of the call, because an equal call draws other numbers.
    """
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
    call: dict[str, Any] = {"target": target, "args": packed, "kwargs": named}
    if may_draw(target):
        call["seed"] = b.number_of_draw(OPAQUE)

    def node(i: int, shape: tuple[int, ...], dtype: str) -> str:
        return b.op(OPAQUE, *operands, **call, result=i, shape=shape, dtype=dtype)

    return tuple(None if kind is None else node(i, *kind) for i, kind in enumerate(types))


def _checked(b: GraphBuilder, name: str, kind: ResultType) -> str:
    """Check that a result has torch's shape, and cast it to torch's dtype.

    In and around regions of `torch.autocast`, floats keep the dtype that the rows give them.
    """
    shape, dtype = kind
    if b.shape(name) != shape:
        raise GraphError(f"expected shape {list(shape)}, the op table gives {list(b.shape(name))}")
    if b.low is not None and is_float(dtype) and is_float(b.types[name].dtype):
        return name
    return b.op("cast", name, dtype=dtype)
