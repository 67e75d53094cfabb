"""Tensors made from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.pcg.aten.registry import HANDLERS, Handler, cast, dtype_name, handles, require
from shardwright.pcg.aten.structure import copy, reshape
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.types import is_float


def full(b: GraphBuilder, shape: Sequence[int], value: Any, dtype: object) -> str:
    """Append a tensor of one value."""
    name = dtype_name(dtype)
    value = bool(value) if name == "bool" else float(value) if is_float(name) else int(value)
    return b.op("full", shape=tuple(shape), value=value, dtype=name)


@handles("full")
def _full(b: GraphBuilder, shape: Sequence[int], value: Any, *, dtype: Any = None) -> str:
    usual = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else b.default_float
    return full(b, shape, value, dtype or usual)


def _as(b: GraphBuilder, x: str, shape: Sequence[int], value: Any, dtype: object) -> str:
    """Append a tensor of one value, in the dtype of x unless another is named."""
    return full(b, shape, value, dtype or b.types[x].dtype)


def _filled(name: str, value: int) -> dict[str, Handler]:
    """Return the handlers of a new tensor, of one with the shape of x, and of one with the dtype of x."""
    return {
        name: lambda b, shape, *, dtype=None: full(b, shape, value, dtype or b.default_float),
        f"{name}_like": lambda b, x, *, dtype=None: _as(b, x, b.shape(x), value, dtype),
        f"new_{name}": lambda b, x, shape, *, dtype=None: _as(b, x, shape, value, dtype),
    }


HANDLERS.update(_filled("zeros", 0) | _filled("ones", 1) | _filled("empty", 0))  # what an empty one holds is open
HANDLERS.update({
    "fill": lambda b, x, value: copy(b, x, value) if isinstance(value, str) else _as(b, x, b.shape(x), value, None),
    "full_like": lambda b, x, value, *, dtype=None: _as(b, x, b.shape(x), value, dtype),
    "new_full": lambda b, x, shape, value, *, dtype=None: _as(b, x, shape, value, dtype),
    "scalar_tensor": lambda b, value, *, dtype=None: full(b, (), value, dtype or b.default_float),
    "zero": lambda b, x: _as(b, x, b.shape(x), 0, None),
})  # fmt: skip


@handles("arange")
def _arange(b: GraphBuilder, *bounds: Any, dtype: Any = None) -> str:
    """Append a range of integers. Bounds may be written as floats if they are whole."""
    start, stop, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    require(all(float(v).is_integer() for v in (start, stop, step)))
    usual = "int64" if all(isinstance(v, int) for v in bounds) else b.default_float
    return b.op("arange", start=int(start), stop=int(stop), step=int(step), dtype=dtype_name(dtype or usual))


@handles("linspace")
def _linspace(b: GraphBuilder, start: float, stop: float, steps: int, *, dtype: Any = None) -> str:
    """Append equal steps, counted from the nearer end, as torch does."""
    name = dtype_name(dtype or b.default_float)
    require(is_float(name) and all(isinstance(end, (int, float)) for end in (start, stop)))
    if steps < 2:
        return full(b, (steps,), start, name)
    step, places = (stop - start) / (steps - 1), b.op("arange", start=0, stop=steps, step=1, dtype="int64")
    first, last = (cast(b, x, name) for x in (places, b.op("sub", steps - 1, places)))
    ends = b.op("add", b.op("mul", first, step), float(start)), b.op("sub", float(stop), b.op("mul", last, step))
    return b.op("where", b.op("lt", places, steps // 2), *ends)


@handles("eye")
def _eye(b: GraphBuilder, rows: int, columns: int | None = None, *, dtype: Any = None) -> str:
    across, down = (b.op("arange", start=0, stop=n, step=1, dtype="int64") for n in (columns or rows, rows))
    return cast(b, b.op("eq", reshape(b, across, (1, columns or rows)), reshape(b, down, (rows, 1))),
                dtype or b.default_float)  # fmt: skip
