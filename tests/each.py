"""Many small cases in one test: `@each` is `@pytest.mark.parametrize` as a loop inside of the test.

A parametrized test costs its collection, its fixtures and a place in the schedule per case, which pays where a case
takes long or is run by itself. Thousands of cases of milliseconds are one test here: all of them run, and the report
names each that failed.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

SHOWN = 5
"""Failures that are shown with their tracebacks; of the others only the cases are named."""

WHOLE_GRIDS = os.environ.get("SHARDWRIGHT_WHOLE_GRIDS", "0") not in ("", "0")
"""Whether every case of every catalogue runs, as in `make test-all`, or some of them."""
RANDOM_CASES = int(os.environ.get("SHARDWRIGHT_RANDOM_CASES", "0")) or (60 if WHOLE_GRIDS else 0)
"""How many random cases each test of random cases has, as `make random` asks; 0: the few of the suite."""
at_random = pytest.mark.skipif(not RANDOM_CASES, reason="`make random` runs it")
"""Marks a test of nothing but random cases, of which the suite runs some that are not random."""
in_whole_grids = pytest.mark.skipif(not WHOLE_GRIDS, reason="`make test-all` runs it")
"""Marks a test that takes seconds, and that others are much like, or whose outcome changes with torch alone."""


def some(cases: Iterable[Case], number: int) -> list[Case]:
    """Return `number` of the cases, spread evenly over them; all of them where `WHOLE_GRIDS`.

    For cases that take long and would fail alike.
    """
    listed = list(cases)
    if WHOLE_GRIDS or number >= len(listed):
        return listed
    return [listed[place * len(listed) // number] for place in range(number)]


def each(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], object] | Iterable[object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test for every case, with its values under `names` as `parametrize` has them; fixtures are made once."""
    arguments = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    listed = [_case(arguments, case) for case in cases]
    called = ids if callable(ids) else None
    given = list(ids) if ids is not None and not callable(ids) else [None] * len(listed)
    texts = [str(one) if one is not None else text or _text(values, called)
             for (values, text), one in zip(listed, given, strict=True)]  # fmt: skip

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def looped(*args: Any, **fixtures: Any) -> None:
            assert listed, f"{test.__name__} has no cases"
            failures, skipped = dict[str, Exception](), list[str]()
            for text, (values, _) in zip(texts, listed, strict=True):
                try:
                    test(*args, **fixtures, **dict(zip(arguments, values, strict=True)))
                except pytest.skip.Exception as skip:
                    skipped.append(f"{text}: {skip}")
                except Exception as error:  # noqa: BLE001  # reported below, with the case's name
                    failures[text] = error
            if failures:
                raise _failed(failures, len(listed))
            if len(skipped) == len(listed):
                pytest.skip(skipped[0])

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in arguments]
        looped.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return looped

    return decorate


def _case(arguments: Sequence[str], case: Any) -> tuple[tuple[Any, ...], str | None]:
    """The values of a case, and the name that it was given."""
    if hasattr(case, "values") and hasattr(case, "marks"):  # pytest.param
        assert not case.marks, "marks of a case need a test of its own"
        return tuple(case.values), case.id
    values = (case,) if len(arguments) == 1 else tuple(case)
    assert len(values) == len(arguments), f"{values} are not {arguments}"
    return values, None


def _text(values: Sequence[Any], called: Callable[[Any], object] | None) -> str:
    return "-".join(str(called(value) if called is not None else value) for value in values)


def _failed(failures: dict[str, Exception], number: int) -> ExceptionGroup[Exception]:
    for text, error in failures.items():
        error.add_note(f"case: {text}")
    others = "".join(f"\n  {text}: {_first(error)}" for text, error in list(failures.items())[SHOWN:])
    shown = list(_leaves(list(failures.values())[:SHOWN]))
    return ExceptionGroup(f"{len(failures)} of {number} cases failed: {', '.join(failures)}{others}", shown)


def _leaves(errors: Sequence[Exception]) -> Iterator[Exception]:
    yield from errors


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
