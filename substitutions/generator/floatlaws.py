"""A test of rules that are exact bit for bit, against those that reassociate: floating point with few laws.

Elements are signed integers whose magnitudes are hashes. Sums and products commute and carry signs exactly, as IEEE
arithmetic does, and have no other law; functions of one element have none; movement moves. Operators that add up many
elements are not known here: whether their sums run in one order depends on the library.

By this test the generator claims that a rule only moves data (`Equation.moves`), for serial and placement rules alike;
`verifier/judge.py` checks the claim on numbers that round, and refutes the rule where it is false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.substitutions.generator.modular import Array
from shardwright.substitutions.generator.residues import OPERATORS, Field, aligned

_MOVEMENT = ("reshape", "permute", "slice", "concat")
_FUNCTIONS = ("exp", "sigmoid", "tanh", "silu", "gelu")
_FIELD = Field()
_BATCH = 16


def _hashed(salt: int, *arrays: Array) -> Array:
    """Return positive 61-bit words."""
    bits = np.zeros((), np.uint64) + np.uint64(salt)
    for x in arrays:
        bits = (bits ^ x.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        bits ^= bits >> np.uint64(32)
    return (bits >> np.uint64(3)).astype(np.int64) + 1


def _add(x: Array, y: Array) -> Array:
    x, y = aligned(x, y)
    sign = np.sign(x + y)
    total = sign * _hashed(1, np.minimum(sign * x, sign * y), np.maximum(sign * x, sign * y))
    return np.where(x == 0, y, np.where(y == 0, x, total))


def _mul(x: Array, y: Array) -> Array:
    x, y = aligned(x, y)
    a, b = np.abs(x), np.abs(y)
    return np.sign(x) * np.sign(y) * _hashed(2, np.minimum(a, b), np.maximum(a, b))


def _div(x: Array, y: Array) -> Array:
    x, y = aligned(x, y)
    return np.sign(x) * np.sign(y) * _hashed(3, np.abs(x), np.abs(y))


def _function(name: str) -> Callable[..., Array]:
    salt = sum(name.encode())
    return lambda x, **attrs: _hashed(salt + 7 * len(str(attrs)), x)


BITS: Mapping[str, Callable[..., Array]] = {
    "add": _add,
    "sub": lambda x, y: _add(x, -y),
    "mul": _mul,
    "div": _div,
    "neg": np.negative,
    "relu": lambda x: np.maximum(x, 0),
    **{name: _function(name) for name in _FUNCTIONS},
}
"""The operators that are exact in floating point: f(*arrays, **attrs)."""


def evaluate(op: str, operands: Sequence[Array], attrs: Mapping[str, Any]) -> Array | None:
    """Return the operator's result on a batch of arrays; None where the order of its sums is not known."""
    if op in _MOVEMENT:
        return OPERATORS[op](_FIELD, *((x,) for x in operands), **attrs)[0]
    return BITS[op](*operands, **attrs) if op in BITS else None


def random(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Return a batch of tensors with elements of both signs; a scalar has both as well."""
    return rng.integers(1, 2**60, (_BATCH, *shape)) * rng.choice((-1, 1), (_BATCH, *shape))
