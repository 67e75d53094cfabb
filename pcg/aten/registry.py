"""The registry of handlers, and the small functions that handlers share.

A handler lifts one ATen operator. It gets the builder, the positional arguments (tensors as node names, everything else
unchanged) and the keyword-only ones, and appends rows. It returns a node name, or for an operator with several results
a tuple with one entry each: None for a result that no row gives. It raises `NotCovered` for arguments that rows do not
express.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.pcg.builder import GraphBuilder

Handler = Callable[..., Any]
Ints = int | Sequence[int]
"""An argument for which ATen takes one number for several dimensions."""

# Keys are names, or name and overload where overloads mean different things; for operators outside ATen,
# namespace::name.
HANDLERS: dict[str, Handler] = {}
IGNORED = frozenset({"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "_guards", "sym_constrain_range"})


class NotCovered(Exception):  # noqa: N818
    """An operator has a handler, but not for these arguments; it becomes opaque."""


class Ref(str):
    """A node name, in a type of its own so that string arguments differ from it."""

    __slots__ = ()


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the function as the handler of these operators."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def require(condition: bool) -> None:
    """Raise `NotCovered` unless the condition holds: handlers guard what they cannot express."""
    if not condition:
        raise NotCovered


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype: "float32" for `torch.float32` and for "float32"."""
    return str(dtype).removeprefix("torch.")


def dimension(b: GraphBuilder, x: str, dim: int, extra: int = 0) -> int:
    """Return the dimension counted from the front, in x with `extra` more dimensions."""
    rank = len(b.shape(x)) + extra
    require(rank > 0)
    return dim % rank


def dimensions(b: GraphBuilder, x: str, dims: Ints) -> tuple[int, ...]:
    """Return the dimensions counted from the front; for a scalar, dimensions 0 and -1 are none."""
    rank = len(b.shape(x))
    return tuple(d % rank for d in ([dims] if isinstance(dims, int) else dims) if rank)


def reduced(b: GraphBuilder, x: str, dims: Ints | None) -> tuple[int, ...]:
    """Return the dimensions that a reduction over `dims` takes: all of them if `dims` names none."""
    return dimensions(b, x, tuple(range(len(b.shape(x)))) if dims is None or dims in ((), []) else dims)


def pair(value: Ints) -> tuple[int, int]:
    """Return a value for each of two spatial dimensions; a single number counts for both."""
    values = [value] if isinstance(value, int) else list(value)
    return (values[0], values[-1])


def cast(b: GraphBuilder, x: str, dtype: object) -> str:
    """Append a cast of x to another dtype; None leaves it unchanged."""
    return x if dtype is None else b.op("cast", x, dtype=dtype_name(dtype))


def scaled(b: GraphBuilder, x: Any, factor: float) -> Any:
    """Append factor · x; a number is multiplied at once."""
    if factor == 1:
        return x
    return b.op("mul", x, factor) if isinstance(x, str) else x * factor
