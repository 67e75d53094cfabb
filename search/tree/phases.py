"""The phases of a search by name, with the seconds that each took; `SHARDWRIGHT_DEBUG=1` shows them as they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


class Phases:
    """The phases of one search.

    Attributes:
        took_s: the seconds of each phase that ended, by its name.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        shown = os.environ.get("SHARDWRIGHT_DEBUG", "0") not in ("", "0")
        self._progress = progress if shown else lambda message: None
        self._start = time.perf_counter()
        self.took_s: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """The seconds since the search began."""
        return round(time.perf_counter() - self._start, 3)

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Time one phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.took_s[name] = time.perf_counter() - start
            self._progress(f"{name}: {self.took_s[name]:.2f} s")

    def __call__(self, name: str, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items of a phase, timed from the first one that is asked for to the end."""
        with self.timed(name):
            yield from items
