"""The numbers that stand for the symbolic sizes of placement contexts.

Every size of a context is a prime, so that a number says which sizes it is the product of. Extents that are no products
(i + j of a concatenation) are remembered with their expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import expression
from shardwright.substitutions.generator.context import PlacementContext
from shardwright.substitutions.rules.attributes import CONSTANTS

_PRIMES = (101, 103, 107, 127, 131, 137, 139, 163, 167)  # no two add up to 2^a 3^b
_BLOCKS_OF_CONCAT = (2, 3)
_SMALLEST = 4  # adding m equal terms must not look like a sum over m


class PrimeSizes:
    """The numbers that stand for symbolic sizes, and back."""

    def __init__(self, context: PlacementContext) -> None:
        named = [name for dims in context.dims.values() for name in dims.names]
        free = iter(p for p in _PRIMES if p not in context.sizes.values())
        self.of: dict[str, Any] = {name: context.sizes.get(name) or next(free) for name in dict.fromkeys(named)}
        self._names = {value: name for name, value in self.of.items()} | {n: str(n) for n in _BLOCKS_OF_CONCAT}
        small = {**dict(zip(self.of, range(_SMALLEST, 99), strict=False)), **context.small}
        self.of.update(CONSTANTS)
        self.small: dict[str, Any] = {**small, **CONSTANTS}
        self._texts: dict[int, str] = {1: "1"}
        self._prefixes: dict[int, set[int]] = {}

    def learn(self, factors: Sequence[int]) -> None:
        """Remember that a dimension is the product of these factors, major first."""
        value = prod(factors)
        at = (prod(factors[:i]) for i in range(1, len(factors)))
        self._prefixes.setdefault(value, set()).update(n for n in at if 1 < n < value)
        if value not in self._texts and all(map(self.known, factors)):
            self._texts[value] = " * ".join(self.text(n) for n in factors if n != 1)

    def name(self, value: int, text: str) -> bool:
        """Remember an extent that is no product; False where the number already stands for something else."""
        plain = str(expression(text))
        return self._texts.setdefault(value, plain) == plain and self._factors(value) is None

    def prefixes(self, value: int) -> tuple[int, ...]:
        """Return the numbers of blocks that a dimension of this size is naturally seen as."""
        return (1, *sorted(self._prefixes.get(value, ())))

    def text(self, value: int) -> str:
        """Return the size as an expression."""
        if value not in self._texts:
            factors = self._factors(value)
            if factors is None:
                raise RuleError(f"no expression for the size {value}; sizes are {self.of}")
            self._texts[value] = " * ".join(self._names[p] for p in factors)
        return self._texts[value]

    def known(self, value: int) -> bool:
        """Return whether the size has an expression."""
        return value in self._texts or self._factors(value) is not None

    def _factors(self, value: int) -> list[int] | None:
        primes: list[int] = []
        for p in sorted(self._names):
            while value % p == 0:
                primes.append(p)
                value //= p
        return primes if value == 1 else None
