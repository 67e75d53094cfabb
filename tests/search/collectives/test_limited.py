"""A search in a process of its own: what it finds, what it raises, and the end of its time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from shardwright.pcg.errors import MachineError, ScheduleError
from shardwright.search.collectives.limited import within


def test_what_is_found_before_the_end_is_found() -> None:
    def endless() -> Iterator[int]:
        yield 1
        yield 2
        time.sleep(60)
        yield 3

    start = time.monotonic()
    assert list(within(0.5, endless)) == [1, 2]
    assert list(within(30, lambda: range(3))) == [0, 1, 2]
    assert next(iter(within(30, endless))) == 1  # and its process is ended
    assert time.monotonic() - start < 5


def test_errors_come_through() -> None:
    def refuses() -> Iterator[int]:
        yield 1
        raise ScheduleError("a root that is no rank")

    def dies() -> Iterator[int]:
        yield 1
        os._exit(1)

    for search, kind, words in ((refuses, ScheduleError, "no rank"), (dies, MachineError, "process died")):
        found = within(30, search)
        assert next(found) == 1
        with pytest.raises(kind, match=words):
            next(found)
