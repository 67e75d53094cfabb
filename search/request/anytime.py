"""The end of a search with what it has found: at a time, or where the user asks for that with Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from shardwright.pcg import checks

T = TypeVar("T")


class _OverError(Exception):
    """The time is over."""


class Stop:
    """The end of one search.

    Attributes:
        reason: why it ended early, or "".
        limit_s: seconds that it may take; None: any.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        """Start the time. Raises `FieldError` for a limit that is no positive number."""
        if limit_s is not None:
            checks.positive(limit_s, "", "time_limit_s", "seconds")
        self.reason, self.limit_s, self._may_end = "", limit_s, False
        self._end = None if limit_s is None else time.perf_counter() + limit_s

    def within(self, items: Iterable[T], *, needed: bool = False) -> Iterator[T]:
        """Yield the items that are made before the end; `needed`: the first in any case.

        An item that is not needed is given up where the time is over (`check`). Ctrl-C while such an item is made ends
        the search; while a needed item is made, it ends the program as ever.
        """
        iterator, nothing = iter(items), object()
        while needed or not self.reached:
            before, self._may_end = self._may_end, not needed
            try:
                item = next(iterator, nothing)
            except _OverError:
                return
            except KeyboardInterrupt:
                if needed:
                    raise
                self.reason = "Ctrl-C"
                return
            finally:
                self._may_end = before
            if item is nothing:
                return
            needed = False
            yield item  # type: ignore[misc]

    def check(self) -> None:
        """Give up an item of `within` that nobody needs, if the time is over; call it before each part of long work."""
        if self._may_end and self.reached:
            raise _OverError

    def last(self) -> Stop:
        """Return the end of what every search does at last: what is left of its time, or a second or a tenth more."""
        if self.limit_s is None or self._end is None:
            return Stop()
        return Stop(max(1.0, self.limit_s / 10, self._end - time.perf_counter()))

    @property
    def reached(self) -> bool:
        """Return whether the search has to end."""
        if not self.reason and self._end is not None and time.perf_counter() >= self._end:
            self.reason = f"the time limit of {self.limit_s:g} s"
        return bool(self.reason)
