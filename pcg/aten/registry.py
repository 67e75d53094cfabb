"""The registry of handlers, and the small things that handlers share.

A handler lifts one ATen operator: it gets the builder, the positional arguments (tensors as node names, everything else
as it is) and the keyword-only ones, appends rows, and returns a node name, or a tuple with one entry per result for
operators with several, None for a result that no row gives. Arguments that the rows do not express are `NotCovered`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.pcg.builder import GraphBuilder

Handler = Callable[..., Any]
Ints = int | Sequence[int]
"""Where ATen takes one number for several dimensions."""

# By name, or by name and overload where overloads mean different things; operators that are not ATen's by
# namespace::name.
HANDLERS: dict[str, Handler] = {}
IGNORED = frozenset({"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "_guards", "sym_constrain_range"})


class NotCovered(Exception):  # noqa: N818
    """A handler's operator has a row, but not for these arguments; it becomes opaque."""


class Ref(str):
    """A node name, told apart from string arguments."""

    __slots__ = ()


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the function as the handler of these operators."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def require(condition: bool) -> None:
    """A guard of handlers: what they cannot express is `NotCovered`."""
    if not condition:
        raise NotCovered


def dtype_name(dtype: object) -> str:
    """`torch.float32` and "float32" -> "float32"."""
    return str(dtype).removeprefix("torch.")


def dimension(b: GraphBuilder, x: str, dim: int, extra: int = 0) -> int:
    """The dimension counted from the front, of x with `extra` more dimensions."""
    rank = len(b.shape(x)) + extra
    require(rank > 0)
    return dim % rank


def dimensions(b: GraphBuilder, x: str, dims: Ints) -> tuple[int, ...]:
    """The dimensions counted from the front; of a scalar, dimensions 0 and -1 are none."""
    rank = len(b.shape(x))
    return tuple(d % rank for d in ([dims] if isinstance(dims, int) else dims) if rank)


def reduced(b: GraphBuilder, x: str, dims: Ints | None) -> tuple[int, ...]:
    """The dimensions that a reduction over `dims` takes: all of them where none is named."""
    return dimensions(b, x, tuple(range(len(b.shape(x)))) if dims is None or dims in ((), []) else dims)


def pair(value: Ints) -> tuple[int, int]:
    """One number for both spatial dimensions, or one for each."""
    values = [value] if isinstance(value, int) else list(value)
    return (values[0], values[-1])


def cast(b: GraphBuilder, x: str, dtype: object) -> str:
    """x in another dtype; None leaves it as it is."""
    return x if dtype is None else b.op("cast", x, dtype=dtype_name(dtype))
