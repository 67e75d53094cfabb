"""Checks of the fields of a cluster description, each with an error that says where, what was expected, and what to do.

A check returns the value in its canonical type (`int` or `float`), so that `8.0` from a JSON file and `np.int64(8)`
are the same cluster as `8`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from numbers import Integral, Real

from shardwright.pcg.errors import ClusterError

LEAST, MOST = 1e-30, 1e30
"""No positive figure of a machine lies beyond; products and quotients of those within neither overflow nor vanish."""


class FieldError(ClusterError):
    """A field is wrong: `owner` is the class or the place in a file, `field` its name, `problem` the rest."""

    def __init__(self, owner: str, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        separator = "" if not owner or owner.endswith((": ", ".")) or field.startswith("[") else "."
        super().__init__(f"{owner}{separator}{field}: {problem}")


@contextmanager
def located(place: str) -> Generator[None]:
    """Name the place in the file, such as `levels[1].`, in the error of a field that is wrong."""
    try:
        yield
    except FieldError as error:
        raise FieldError(place, error.field, error.problem) from None


def positive(value: object, owner: str, field: str, unit: str) -> float:
    """Return `value` as a float; raise a `FieldError` unless it is a number from `LEAST` to `MOST`."""
    number = _finite(value)
    if number is None or number < LEAST:
        raise FieldError(owner, field, f"expected a positive number, got {_show(value)}; give it in {unit}")
    return number


def non_negative(value: object, owner: str, field: str, unit: str) -> float:
    """Return `value` as a float; raise a `FieldError` unless it is a number from 0 to `MOST`."""
    number = _finite(value)
    if number is None or number < 0:
        raise FieldError(owner, field, f"expected a number of at least 0, got {_show(value)}; give it in {unit}")
    return number


def fraction(value: object, owner: str, field: str, meaning: str) -> float:
    """Return `value` as a float; raise a `FieldError` unless 0 < value <= 1."""
    number = _finite(value)
    if number is None or not 0 < number <= 1:
        raise FieldError(owner, field, f"expected a number above 0 and at most 1, got {_show(value)}; it is {meaning}")
    return number


def positive_int(value: object, owner: str, field: str, meaning: str) -> int:
    """Return `value` as an int; raise a `FieldError` unless it is a whole number of at least 1."""
    number = _finite(value)
    if number is None or number < 1 or number != math.floor(number):
        raise FieldError(owner, field, f"expected a positive integer, got {_show(value)}; it is {meaning}")
    return int(value) if isinstance(value, Integral) else int(number)


def text(value: object, owner: str, field: str, meaning: str) -> str:
    """Return `value`; raise a `FieldError` unless it is a non-empty string."""
    if not isinstance(value, str) or not value.strip():
        raise FieldError(owner, field, f"expected a non-empty string, got {_show(value)}; it is {meaning}")
    return value


def choice(value: object, owner: str, field: str, allowed: Collection[str]) -> str:
    """Return `value`; raise a `FieldError` unless it is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise FieldError(owner, field, f"expected one of {_names(allowed)}, got {_show(value)}; choose one of them")
    return value


Check = Callable[[object, str, str, str], object]


def canonical(owner: object, table: Mapping[str, tuple[Check, str]]) -> None:
    """Check fields of a frozen dataclass, and set them to the types that the checks return.

    `table`: by field, the check and its last argument, which describes the value.
    """
    for name, (check, meaning) in table.items():
        object.__setattr__(owner, name, check(getattr(owner, name), type(owner).__name__, name, meaning))


def json_object(
    value: object, place: str, required: Collection[str], optional: Collection[str] = ()
) -> dict[str, object]:
    """Return `value` as a dict with every field of `required`, and no others but those of `optional`.

    Raises:
        ClusterError: naming `place` and the missing or unknown fields.
    """
    if not isinstance(value, Mapping):
        raise ClusterError(f"{place}: expected an object with the fields {_names(required)}, got {_show(value)}")
    fields = {str(key): entry for key, entry in value.items()}
    missing = [name for name in required if name not in fields]
    if missing:
        raise ClusterError(f"{place}: missing field {_names(missing)}, got {_names(fields)}; add it")
    unknown = [name for name in fields if name not in required and name not in optional]
    if unknown:
        advice = f"remove it or correct it to one of {_names([*required, *optional])}"
        raise ClusterError(f"{place}: unknown field {_names(unknown)}; {advice}")
    return fields


def json_list(value: object, place: str, of_what: str) -> list[object]:
    """Return `value`; raise a `ClusterError` naming `place` unless it is a list."""
    if not isinstance(value, list):
        raise ClusterError(f"{place}: expected a list of {of_what}, got {_show(value)}")
    return list(value)


def _finite(value: object) -> float | None:
    """Return `value` as a float; None if it is no number, or its size is above `MOST`."""
    number = _number(value)
    return number if number is not None and abs(number) <= MOST else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _names(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def _show(value: object) -> str:
    shown, number = str(value) if isinstance(value, Fraction) else repr(value), _number(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    beyond = number is not None and (MOST < abs(number) < math.inf or 0 < abs(number) < LEAST)
    return f"{shown}, beyond what a machine has" if beyond else shown
