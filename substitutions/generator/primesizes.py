"""Contexts of placement rules, and the numbers that stand for their symbolic sizes.

Every size of a context is a prime, so that a number says which sizes it is the product of. Extents that are no products
(i + j of a concatenation) are remembered with their expression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import expression
from shardwright.substitutions.terms import Dims

CONSTANTS: Mapping[str, Any] = {
    "eps": 1e-5, "scale": 0.5, "smoothing": 0.25, "ignore": -100, "pad": None,
    "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1),
}  # fmt: skip
"""Attributes that a rule leaves free, and a value of each."""
_PRIMES = (101, 103, 107, 127, 131, 137, 139, 163, 167)  # no two add up to 2^a 3^b
_BLOCKS_OF_CONCAT = (2, 3)
_SMALLEST = 4  # adding m equal terms must not look like a sum over m


@dataclass(frozen=True)
class PlacementContext:
    """What placement rules are made of: variables, and operators to apply to them along the axes.

    name        of the context
    variables   the dims of every variable
    operators   operators with their attributes, as `softmax(dim=1)` or `linear`; each is applied wherever it fits
    indices     integer variables, each with the size that they count up to
    axes        the mesh axes
    whole       sizes that are never sharded
    sizes       the prime that a size stands for, where the choice matters
    small       the size at which fingerprints are taken, where the choice matters
    parts       of the numbers that fingerprints are made of: one, and one more for exponentials
    """

    name: str
    variables: tuple[tuple[str, str], ...]
    operators: tuple[str, ...]
    indices: tuple[tuple[str, str], ...] = ()
    axes: tuple[str, ...] = ("a",)
    whole: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    small: tuple[tuple[str, int], ...] = ()
    parts: int = 2

    def __post_init__(self) -> None:
        sizes = {name for _, dims in self.variables for name in Dims.parse(dims).names}
        if sizes & set(self.axes):
            raise RuleError(f"context {self.name!r}: {min(sizes & set(self.axes))!r} names a size and an axis")


class PrimeSizes:
    """The numbers that stand for symbolic sizes, and back."""

    def __init__(self, context: PlacementContext) -> None:
        named = [n for _, dims in context.variables for n in Dims.parse(dims).names]
        given = dict(context.sizes)
        free = iter(p for p in _PRIMES if p not in given.values())
        self.of: dict[str, Any] = {name: given.get(name) or next(free) for name in dict.fromkeys(named)}
        self._names = {value: name for name, value in self.of.items()} | {n: str(n) for n in _BLOCKS_OF_CONCAT}
        small = dict(zip(self.of, range(_SMALLEST, 99), strict=False)) | dict(context.small)
        self.of.update(CONSTANTS)
        self.small: dict[str, Any] = {**small, **CONSTANTS}
        self._texts: dict[int, str] = {1: "1"}
        self._prefixes: dict[int, set[int]] = {}

    def learn(self, factors: Sequence[int]) -> None:
        """A dimension is the product of these factors, major first."""
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
        """The numbers of blocks that a dimension of this size is naturally seen as."""
        return (1, *sorted(self._prefixes.get(value, ())))

    def text(self, value: int) -> str:
        """The size as an expression."""
        if value not in self._texts:
            factors = self._factors(value)
            if factors is None:
                raise RuleError(f"no expression for the size {value}; sizes are {self.of}")
            self._texts[value] = " * ".join(self._names[p] for p in factors)
        return self._texts[value]

    def known(self, value: int) -> bool:
        """Whether the size has an expression."""
        return value in self._texts or self._factors(value) is not None

    def _factors(self, value: int) -> list[int] | None:
        found: list[int] = []
        for p in sorted(self._names):
            while value % p == 0:
                found.append(p)
                value //= p
        return found if value == 1 else None
