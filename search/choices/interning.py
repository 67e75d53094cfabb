"""Interning: equal things are one object, and what was computed from equal things is computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_NOTHING = object()


@dataclass(frozen=True, slots=True, eq=False)
class Interned(Generic[T]):
    """A value that stands for how it was made: it equals itself alone, and is part of the keys of what is made of it.

    Arrays cannot be hashed, and long tuples are slow to hash; interned ones are compared by identity.
    """

    value: T


class Interner:
    """Keeps one object per key, so that equal things are identical.

    `check` is called before anything is made: a search that has to end raises there.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.made: dict[Hashable, Any] = {}
        self.check = check

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object made for an equal key before, or make a new one."""
        made = self.made.get(key, _NOTHING)
        if made is _NOTHING:
            self.check()
            made = self.made[key] = make()
        return made

    def of(self, value: T) -> Interned[T]:
        """Return the one `Interned` of this value and of every value that equals it."""
        return self.get((Interned, value), lambda: Interned(value))

    def call(self, function: Callable[..., T], *args: Hashable) -> Interned[T]:
        """Return `function(*args)`, computed once; interned arguments reach the function as their values."""
        key = (function, *args)
        made = self.made.get(key)
        if made is None:
            self.check()
            plain = (a.value if isinstance(a, Interned) else a for a in args)
            made = self.made[key] = Interned(function(*plain))
        return made


class Forgetful(Interner):
    """An interner that keeps nothing, for values that are large and not made twice."""

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        self.check()
        return make()

    def call(self, function: Callable[..., T], *args: Hashable) -> Interned[T]:
        self.check()
        return Interned(function(*(a.value if isinstance(a, Interned) else a for a in args)))
