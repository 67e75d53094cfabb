"""Primes, which stand for symbolic sizes: a number then says which sizes it is the product of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count


def primes(start: int = 2) -> Iterator[int]:
    """Return the primes from a number on."""
    return (n for n in count(start) if all(n % d for d in range(2, int(n**0.5) + 1)))
