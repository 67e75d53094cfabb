"""Walks along deep graphs, without Python's stack."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def postorder(starts: Iterable[K], follow: Callable[[K], Iterable[K]]) -> Iterator[K]:
    """Yield the starts and all that they lead to, each once and after what it leads to. There must be no cycles."""
    seen: set[K] = set()
    stack: list[tuple[K | None, Iterator[K]]] = [(None, iter(starts))]
    while stack:
        key, further = stack[-1]
        new = next((k for k in further if k not in seen), None)
        if new is not None:
            seen.add(new)
            stack.append((new, iter(follow(new))))
            continue
        stack.pop()
        if key is not None:
            yield key
