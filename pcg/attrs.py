"""Attributes of operators: their types, and accessors that check what they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.pcg.errors import GraphError

Attr = int | float | bool | str | None | tuple[Any, ...]
Attrs = Mapping[str, Attr]


def get(attrs: Attrs, key: str) -> Attr:
    """Return the attribute; raise a `GraphError` if there is none of that name."""
    if key not in attrs:
        raise GraphError(f"attribute {key!r} is missing; there are {sorted(attrs)}")
    return attrs[key]


def integer(attrs: Attrs, key: str) -> int:
    """Return an attribute that must be an integer."""
    value = get(attrs, key)
    if not isinstance(value, int):
        raise GraphError(f"attribute {key!r} should be an integer, got {value!r}")
    return value


def integers(attrs: Attrs, key: str, length: int | None = None) -> tuple[int, ...]:
    """Return an attribute that must be a tuple of integers, of this length if one is given."""
    value = get(attrs, key)
    if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
        raise GraphError(f"attribute {key!r} should be a tuple of integers, got {value!r}")
    if length is not None and len(value) != length:
        raise GraphError(f"attribute {key!r} should have {length} entries, got {value!r}")
    return value


def dimension(attrs: Attrs, key: str, rank: int) -> int:
    """Return an attribute that must name a dimension of a tensor of this rank, counted from the front."""
    dim = integer(attrs, key)
    if not 0 <= dim < rank:
        raise GraphError(
            f"attribute {key!r} is {dim}, not a dimension of a tensor of rank {rank}; count from the front"
        )
    return dim


def dimensions(attrs: Attrs, key: str, rank: int) -> tuple[int, ...]:
    """Return an attribute that must name different dimensions of a tensor of this rank, counted from the front."""
    dims = integers(attrs, key)
    if len(set(dims)) != len(dims) or not all(0 <= dim < rank for dim in dims):
        raise GraphError(f"attribute {key!r} is {dims}, not different dimensions of a tensor of rank {rank}")
    return dims
