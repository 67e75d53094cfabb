"""Integers modulo a prime p = 2q + 1, q an odd prime, as stand-ins for real numbers, vectorised.

The nonzero residues are a cyclic group of order 2q, of which the squares are the half of order q. Squares play the
positive numbers: -1 is no square and 2 is one (p = 7 mod 8), so that

    relu(x) = x if x is a square, else 0       relu(relu(x)) = relu(x),  x = relu(x) - relu(-x),  relu(2x) = 2 relu(x)
    abs(x) = x or -x, whichever is a square    sqrt(x) = the root that is a square

and ω^a (ω a square that generates them) maps sums modulo q to products modulo p: the exponential; `log` goes back.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Ring:
    """Arithmetic modulo p. Arrays are int64; products are reduced at once, so nothing overflows for p < 2^21.5."""

    def __init__(self, p: int) -> None:
        self.p, self.q = p, (p - 1) // 2

    def reduce(self, x: Array) -> Array:
        """Return the residues in [0, p)."""
        return x - x // self.p * self.p

    def number(self, numerator: int, denominator: int = 1) -> int:
        """Return a rational number as a residue."""
        return numerator * pow(denominator, -1, self.p) % self.p

    # ---- tables of the multiplicative group ----

    @cached_property
    def _generator(self) -> int:
        return next(g for g in range(2, self.p) if pow(g, self.q, self.p) == self.p - 1 and g * g % self.p != 1)

    @cached_property
    def _powers(self) -> Array:
        """The powers g^k for every k < 2q."""
        powers, step = np.ones(1, np.int64), self._generator
        while len(powers) < 2 * self.q:
            powers = np.concatenate([powers, self.reduce(powers * step)])
            step = step * step % self.p
        return powers[: 2 * self.q]

    def _table(self, values: Array) -> Array:
        """Return the table of a function of nonzero x, given in the order of the powers; 0 for x = 0."""
        table = np.zeros(self.p, np.int32)
        table[self._powers] = values
        return table

    @cached_property
    def _inverses(self) -> Array:
        return self._table(np.roll(self._powers[::-1], 1))

    @cached_property
    def _signs(self) -> Array:
        return self._table(1 - 2 * (np.arange(2 * self.q) % 2))

    @cached_property
    def _roots(self) -> Array:
        """The table of the square whose square is x or -x."""
        k = np.arange(2 * self.q)
        square = np.where(k % 2, (k + self.q) % (2 * self.q), k)  # the exponent of abs(x), even
        half = square // 2
        return self._table(self._powers[np.where(half % 2, (half + self.q) % (2 * self.q), half)])

    @cached_property
    def _exponentials(self) -> Array:
        return np.ascontiguousarray(self._powers[::2]).astype(np.int32)

    @cached_property
    def _logarithms(self) -> Array:
        half = pow(2, -1, self.q)
        return self._table(np.arange(2 * self.q) % self.q * half % self.q)

    # ---- pointwise ----

    def inverse(self, x: Array) -> Array:
        """Return 1 / x, and 0 for 0."""
        return self._inverses[x].astype(np.int64)

    def sign(self, x: Array) -> Array:
        """Return 1 for squares, -1 for the others, 0 for 0."""
        return self._signs[x].astype(np.int64)

    def relu(self, x: Array) -> Array:
        return np.where(self._signs[x] > 0, x, 0)

    def absolute(self, x: Array) -> Array:
        return np.where(self._signs[x] < 0, self.p - x, x)

    def root(self, x: Array) -> Array:
        """Return the square whose square is abs(x)."""
        return self._roots[x].astype(np.int64)

    def exponential(self, x: Array) -> Array:
        """Return ω^x for x modulo q: a square; it takes sums to products."""
        return self._exponentials[x].astype(np.int64)

    def logarithm(self, x: Array) -> Array:
        """Return the inverse of the exponential on squares, modulo q; it takes products to sums."""
        return self._logarithms[x].astype(np.int64)

    def hashed(self, x: Array, salt: int) -> Array:
        """Return a fixed function of x without laws."""
        bits = (x.astype(np.uint64) + np.uint64(salt)) * np.uint64(_MIX[0])
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX[1])
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX[2])
        return ((bits ^ (bits >> np.uint64(31))) % np.uint64(self.p)).astype(np.int64)

    def positive(self, x: Array, salt: int) -> Array:
        """Return a fixed function of x without laws whose values are squares."""
        h = self.hashed(x, salt)
        return self.reduce(h * h)

    def odd(self, x: Array, salt: int) -> Array:
        """Return f(x) of a fixed function f with f(-x) = -f(x) and no other law."""
        return self.reduce(self.sign(x) * self.hashed(self.absolute(x), salt))

    def matmul(self, x: Array, y: Array) -> Array:
        return self.reduce(np.matmul(x, y))


@lru_cache(maxsize=8)
def ring(p: int) -> Ring:
    """Return the one ring of that size: its tables are made once."""
    return Ring(p)
