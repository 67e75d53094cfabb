"""Attributes: accessors that check what they read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.pcg.attrs import Attr, Attrs, dimension, dimensions, get, integer, integers
from shardwright.pcg.errors import GraphError
from tests.each import each

ATTRS: Attrs = {"dim": 1, "dims": (0, 2), "name": "x", "mixed": (1, "a"), "twice": (1, 1), "back": -1}


def test_values() -> None:
    assert get(ATTRS, "name") == "x"
    assert integer(ATTRS, "dim") == dimension(ATTRS, "dim", 2) == 1
    assert integers(ATTRS, "dims") == integers(ATTRS, "dims", 2) == dimensions(ATTRS, "dims", 3) == (0, 2)


@each(
    ("read", "message"),
    [
        (lambda: get({"b": 1, "a": 2}, "x"), r"attribute 'x' is missing; there are \['a', 'b'\]"),
        (lambda: integer(ATTRS, "name"), r"attribute 'name' should be an integer, got 'x'"),
        (lambda: integers(ATTRS, "dim"), r"attribute 'dim' should be a tuple of integers, got 1"),
        (lambda: integers(ATTRS, "mixed"), r"attribute 'mixed' should be a tuple of integers, got \(1, 'a'\)"),
        (lambda: integers(ATTRS, "dims", 3), r"attribute 'dims' should have 3 entries, got \(0, 2\)"),
        (
            lambda: dimension(ATTRS, "dim", 1),
            r"attribute 'dim' is 1, not a dimension of a tensor of rank 1; count from",
        ),
        (lambda: dimension(ATTRS, "back", 3), r"attribute 'back' is -1, not a dimension of a tensor of rank 3"),
        (
            lambda: dimensions(ATTRS, "dims", 2),
            r"attribute 'dims' is \(0, 2\), not different dimensions of a tensor of",
        ),
        (lambda: dimensions(ATTRS, "twice", 3), r"attribute 'twice' is \(1, 1\), not different dimensions of a tensor"),
    ],
)
def test_messages(read: Callable[[], Attr], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        read()
