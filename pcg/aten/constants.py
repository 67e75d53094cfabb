"""Tensors made from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.pcg.aten.registry import HANDLERS, Handler, dtype_name, handles, require
from shardwright.pcg.aten.structure import copy
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.types import is_float

_FILLS = {"zeros": 0, "ones": 1, "empty": 0}  # what is in a new empty tensor is anybody's guess


def full(b: GraphBuilder, shape: Sequence[int], value: Any, dtype: object) -> str:
    """A tensor of one value."""
    name = dtype_name(dtype)
    value = bool(value) if name == "bool" else float(value) if is_float(name) else int(value)
    return b.op("full", shape=tuple(shape), value=value, dtype=name)


@handles("full")
def _full(b: GraphBuilder, shape: Sequence[int], value: Any, *, dtype: Any = None) -> str:
    usual = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else b.default_float
    return full(b, shape, value, dtype or usual)


@handles("full_like")
def _full_like(b: GraphBuilder, x: str, value: Any, *, dtype: Any = None) -> str:
    return _new_full(b, x, b.shape(x), value, dtype=dtype)


@handles("new_full")
def _new_full(b: GraphBuilder, x: str, shape: Sequence[int], value: Any, *, dtype: Any = None) -> str:
    return full(b, shape, value, dtype or b.types[x].dtype)


def _filled(value: int) -> tuple[Handler, Handler, Handler]:
    """A new tensor, one like another, and one of another's dtype."""
    return (
        lambda b, shape, *, dtype=None: full(b, shape, value, dtype or b.default_float),
        lambda b, x, *, dtype=None: _full_like(b, x, value, dtype=dtype),
        lambda b, x, shape, *, dtype=None: _new_full(b, x, shape, value, dtype=dtype),
    )


for _name, _value in _FILLS.items():
    HANDLERS.update(zip((_name, f"{_name}_like", f"new_{_name}"), _filled(_value), strict=True))


@handles("scalar_tensor")
def _scalar_tensor(b: GraphBuilder, value: Any, *, dtype: Any = None) -> str:
    return full(b, (), value, dtype or b.default_float)


@handles("fill")
def _fill(b: GraphBuilder, x: str, value: Any) -> str:
    return copy(b, x, value) if isinstance(value, str) else full(b, b.shape(x), value, b.types[x].dtype)


@handles("zero")
def _zero(b: GraphBuilder, x: str) -> str:
    return full(b, b.shape(x), 0, b.types[x].dtype)


@handles("arange")
def _arange(b: GraphBuilder, *bounds: Any, dtype: Any = None) -> str:
    """Of integers, also where they are written as floats."""
    start, stop, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    require(all(float(v).is_integer() for v in (start, stop, step)))
    usual = "int64" if all(isinstance(v, int) for v in bounds) else b.default_float
    return b.op("arange", start=int(start), stop=int(stop), step=int(step), dtype=dtype_name(dtype or usual))
