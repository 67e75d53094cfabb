"""Interning: identity stands for equality, and what is computed of equal things is computed once."""

from __future__ import annotations

import numpy as np

from shardwright.search.choices.interning import Interned, Interner
from tests.search.graphs import num_made


def test_equal_keys_make_one_object() -> None:
    interner = Interner()
    first = interner.get(("pair", 1), lambda: [1])
    assert interner.get(("pair", 1), lambda: [2]) is first
    assert interner.get(("pair", 2), lambda: [2]) == [2]
    assert num_made(interner, "pair") == 2


def test_nothing_is_an_object_too() -> None:
    interner = Interner()
    assert interner.get("key", lambda: None) is None
    assert interner.get("key", lambda: 1) is None


def test_equal_values_are_one_interned_value() -> None:
    interner = Interner()
    assert interner.of((1, 2)) is interner.of((1, 2))
    assert interner.of((1, 2)) is not interner.of((2, 1))


def test_an_interned_value_equals_itself_alone() -> None:
    """Two arrays that were made in different ways are two, whatever is in them."""
    a, b = Interned(np.zeros(2)), Interned(np.zeros(2))
    assert a != b
    assert len({a, b}) == 2


def test_a_call_is_computed_once_for_the_same_arguments_in_the_same_places() -> None:
    interner, calls = Interner(), []

    def minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        calls.append((a, b))
        return a - b

    one, two = interner.call(np.full, 3, 1.0), interner.call(np.full, 3, 2.0)
    assert interner.call(minus, two, one) is interner.call(minus, two, one)
    assert interner.call(minus, one, two) is not interner.call(minus, two, one)
    assert len(calls) == num_made(interner, minus) == 2
    assert interner.call(minus, two, one).value.tolist() == [1.0] * 3


def test_a_key_keeps_what_it_is_made_of() -> None:
    """An array that nobody holds any more is not mistaken for the next one in its memory."""
    interner = Interner()
    found = [interner.call(np.add, Interned(np.full(1, float(i))), 0.0).value.item() for i in range(100)]
    assert found == [float(i) for i in range(100)]
