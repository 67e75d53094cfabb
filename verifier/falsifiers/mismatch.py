"""Counterexamples of falsifiers: concrete tensors for which two sides differ, and the comparison of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.pcg.errors import GraphError
from shardwright.pcg.interpret import Array

ERRORS = (GraphError, TypeError, ValueError, KeyError, IndexError, ZeroDivisionError, OverflowError, ArithmeticError)
"""The errors of NumPy and of rows for operands that do not fit."""
LOWEST = -1e30
"""The number that stands for minus infinity in a mask."""


@dataclass(frozen=True)
class Mismatch:
    """Concrete tensors for which the two sides of a rule differ; `note` adds facts that the tensors do not show."""

    rule: str
    sizes: Mapping[str, Any]
    tensors: Mapping[str, Array]
    left: Array
    right: Array | str
    note: str = ""

    def __str__(self) -> str:
        lines = [f"{self.rule} is false for {', '.join(f'{k} = {v}' for k, v in self.sizes.items())}"]
        lines += listed({**self.tensors, "left": self.left})
        lines.append(f"  right = {self.right if isinstance(self.right, str) else _short(self.right)}")
        lines += [f"  {self.note}"] if self.note else []
        return "\n".join(lines)


def listed(tensors: Mapping[str, Array]) -> list[str]:
    """Return a line for each tensor."""
    return [f"  {name} {list(np.shape(array))} = {_short(array)}" for name, array in tensors.items()]


_MOST = 24


def _short(array: Array) -> str:
    """Return a tensor on one line; for a large tensor its first elements, in row-major order."""
    array = np.asarray(array)
    if array.size <= _MOST:
        return np.array2string(array, precision=6).replace("\n", "")
    return np.array2string(array.ravel()[:_MOST], precision=6, max_line_width=10_000)[:-1] + " ...]"


def largest_of(value: Array) -> float:
    """Return the greatest finite magnitude, at least 1."""
    finite = value[np.isfinite(value) & (value > LOWEST / 2)] if value.dtype.kind == "f" else value
    return float(np.abs(finite).max(initial=1.0)) if finite.size else 1.0


def same(want: Array, have: Array, largest: float) -> bool:
    """Return whether results are equal wherever the first one exists, up to the rounding of values up to `largest`."""
    want, have = np.asarray(want, float), np.asarray(have, float)
    if want.shape != have.shape:
        return False
    exists = np.isfinite(want)
    if largest > 1e9:  # too ill-conditioned to tell
        return True
    return bool(np.allclose(have[exists], want[exists], rtol=1e-6, atol=1e-12 * largest + 1e-9))
